"""Reference solvers for plans, slow and plain: every choice there is, and an exact program."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from jrc.remat._planner.costs.cost_graph import CostGraph, CostNode
from jrc.remat._planner.plan.decision import LeftToJax, Loop, LoopPart, Region, Stages
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._planner.solver.decisions import saved_values
from jrc.remat._planner.solver.option import Option, made


@dataclasses.dataclass(frozen=True)
class Inside:
    """A way of a loop inside of a region: each step keeps and recomputes as the option says."""

    option: Option


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a choice costs, and what it keeps and runs again."""

    peak: int
    cost: int
    saved: int
    kept: frozenset[int]
    recomputed: frozenset[int]


def every_choice(graph: CostGraph, options: Mapping[int, Sequence[Option]] | None = None, times=1):
    """What every set of values to keep costs, with every way of keeping the constructs."""
    options = options or {}
    makers = {v: node for node in graph.nodes for v in node.makes}
    free = [v for v in makers if graph.may_save[v] and not must_keep(graph, makers[v], v)]
    ways = [
        [
            *ways_outside(node, options),
            # No region may hold an effect.
            *([] if node.has_effects else [None, *map(Inside, options.get(node.position, [])[:1])]),
        ]
        for node in graph.nodes
        if stands_outside(node)
    ]
    for size in range(len(free) + 1):
        for kept in itertools.combinations(free, size):
            for chosen in itertools.product(*ways):
                cost = cost_of(graph, frozenset(kept), chosen, times)
                if cost is not None:
                    yield cost


def stands_outside(node):
    """Whether an equation may, or must, stand outside of all regions."""
    return node.inner_bytes is not None or node.has_effects


def ways_outside(node, options):
    left = LeftToJax((node.position,))
    jaxs = Option(0, node.inner_bytes or 0, node.inner_cost, made(left))
    return options.get(node.position) or [jaxs]


def values_of(graph, option):
    """The values that are there for the backward pass: what regions save, all made outside."""
    left = {p for each in option.stages.stages if not isinstance(each, Region)
            for p in each.equations}  # fmt: skip
    made = (v for node in graph.nodes if node.position in left for v in node.makes)
    return saved_values(graph, option.stages) | frozenset(made)


def ways_of_constructs(graph, options, option):
    """For every construct, in order, the way that an option has: see `cost_of`."""
    inside = {p for each in option.stages.stages if isinstance(each, Region)
              for p in each.equations}  # fmt: skip
    loops = {k: Inside(way) for k, way in loops_inside_of(options, option).items()}
    return [
        loops.get(node.position) if node.position in inside else _way_outside(node, options, option)
        for node in graph.nodes
        if stands_outside(node)
    ]


def loops_inside_of(options, option):
    """By position, the options of loops that run under them inside of a region."""
    loops = [loop for region in option.stages.regions for loop in region.inside]
    return {k: way for k, some in options.items() for way in some if way.decision in loops}


def _way_outside(node, options, option):
    stage = next(each for each in option.stages.stages if node.position in each.equations)
    ways = ways_outside(node, options)
    if isinstance(stage, LeftToJax) and len(stage.equations) > 1:
        # It stands among equations that are left to JAX, where nothing inside of it is saved.
        assert node.inner_bytes == 0
        return None
    return next((way for way in ways if way.decision == stage), None)


def must_keep(graph, node, v):
    """What must not be recomputed; a plan of a large program also keeps what is tiny."""
    total = sum(size for size, may in zip(graph.sizes, graph.may_save, strict=True) if may)
    tiny = 0 if all(graph.may_save) else int(total * SETTINGS.tiny_share)
    return node.runs_once or graph.sizes[v] <= tiny


def cost_of(graph, keep, ways, times=1):
    """The cost of keeping these of the values that are wanted; `None` if that cannot be run.

    `ways` has for every construct what is kept of its inside where it stands outside of all
    regions, and `None` where it is part of one; `Inside` of a loop that has a way there.
    """
    nodes = graph.nodes
    constructs = [k for k, node in enumerate(nodes) if stands_outside(node)]
    chosen = list(zip(constructs, ways, strict=True))
    outside = {k: way for k, way in chosen if isinstance(way, Option)}
    inside = {k: way.option for k, way in chosen if isinstance(way, Inside)}
    maker = {v: k for k, node in enumerate(nodes) for v in node.makes}

    # What is wanted, and until where: grown until nothing is added.
    until: dict[int, int] = {}
    recomputed: set[int] = {k for k in constructs if k not in outside and nodes[k].inner_bytes}
    kept: set[int] = set()
    while True:
        wanted = {(v, k) for k, node in enumerate(nodes) for v in node.derivative_reads}
        wanted |= {(v, k) for k in recomputed for v in nodes[k].reads}
        before = len(until), sum(until.values()), len(recomputed), len(kept)
        for v, k in wanted:
            if v in keep or must_keep(graph, nodes[maker[v]], v):
                kept.add(v)
            else:
                until[v] = max(until.get(v, -1), k)
                recomputed.add(maker[v])
        if before == (len(until), sum(until.values()), len(recomputed), len(kept)):
            break
    if any(nodes[k].runs_once for k in recomputed) or recomputed & outside.keys():
        return None
    if any(maker[v] < k <= last for v, last in until.items() for k in outside):
        return None

    # A region ends behind equation k if nothing recomputed up to there is read later.
    first, firsts = 0, []
    for k in range(len(nodes)):
        firsts.append(first)
        if all(last <= k for v, last in until.items() if maker[v] <= k):
            first = k + 1

    def kept_at(k):
        inside = outside[k].saved if k in outside else 0
        return inside + sum(graph.sizes[v] for v in nodes[k].makes if v in kept)

    def there_at(k):
        """Bytes that come with equation k of the region that is being differentiated."""
        node, size = nodes[k], kept_at(k)
        if k in outside:
            way = outside[k]
            return max(size, size - way.saved + way.peak)
        size += sum(graph.recomputed_bytes[v] for v in node.makes if v in until)
        size += sum(width for v, width in node.operands if v in until)
        inner = inside[k].peak if k in inside else node.inner_bytes or 0
        return size + inner * (k in recomputed)

    def early_at(k):
        """Bytes of what the loops of equation k write into, which is there before them."""
        return nodes[k].early_bytes + nodes[k].early_again_bytes * (k in recomputed)

    def held_at(k):
        """Bytes that lie there from the start of the program on, as a region holds equation k."""
        is_inside = any(maker[v] == k or maker[v] < k <= last for v, last in until.items())
        return nodes[k].held_bytes if is_inside else 0

    total = sum(kept_at(k) for k in range(len(nodes)))
    peak = 0
    for k, node in enumerate(nodes):
        # The other turns of a loop have kept all that they keep.
        size = (times - 1) * total + sum(kept_at(j) for j in range(firsts[k]))
        size += sum(there_at(j) for j in range(firsts[k], k + 1))
        size += sum(map(held_at, range(k + 1))) + sum(map(early_at, range(k)))
        here = node.momentary_bytes + sum(graph.passing_bytes[v] for v in node.makes if v in until)
        peak = max(peak, size + here, size + early_at(k))  # while it is differentiated, and before
    cost = sum(nodes[k].cost for k in recomputed) + sum(way.cost for way in outside.values())
    cost += sum(way.cost for k, way in inside.items() if k in recomputed)
    cost += sum(nodes[k].inner_cost for k in recomputed if k not in inside)
    return Cost(peak, times * cost, times * total, frozenset(kept), frozenset(recomputed))


def front(costs):
    """The least cost for every peak: pairs with rising peak and falling cost."""
    found: list[tuple[int, int]] = []
    for peak, cost in sorted({(each.peak, each.cost) for each in costs}):
        if not found or cost < found[-1][1]:
            found.append((peak, cost))
    return found


def least_cost(points, peak):
    """The least cost of those that need no more than this; infinite if there are none."""
    return min((cost for size, cost in points if size <= peak), default=float("inf"))


@st.composite
def node_tables(draw, least=1, most=9, constructs=True):
    """Graphs that no program need have: any reads, needs, sizes, and what must not run again.

    Without constructs every equation makes one value.
    """
    count = draw(st.integers(least, most))
    nodes, made = [], 0
    for k in range(count):
        reads: tuple[int, ...] = ()
        if made:
            recent = st.integers(max(0, made - 3), made - 1) | st.integers(0, made - 1)
            reads = tuple(draw(st.lists(recent, max_size=3, unique=True)))
        results = draw(st.sampled_from([1, 1, 1, 2])) if constructs else 1
        makes = tuple(range(made, made + results))
        made += len(makes)
        active = draw(st.sampled_from([True, True, True, False]))
        has_effects = constructs and draw(st.integers(0, 7)) == 0
        inner_bytes = None
        if active and constructs and draw(st.integers(0, 4)) == 0:
            inner_bytes = draw(st.sampled_from([0, 7, 40]))
        if inner_bytes is not None:
            derivative_reads = frozenset(reads)
        else:
            asked = st.lists(st.sampled_from([*reads, *makes]), unique=True)
            derivative_reads = frozenset(draw(asked)) if active else frozenset()
        nodes.append(
            CostNode(
                position=k,
                reads=reads,
                makes=makes,
                derivative_reads=derivative_reads,
                cost=draw(st.integers(0, 30)),
                inner_bytes=inner_bytes,
                inner_cost=draw(st.sampled_from([0, 6])) if inner_bytes else 0,
                active=active,
                runs_once=has_effects or draw(st.sampled_from([False] * 5 + [True])),
                has_effects=has_effects,
                held_bytes=draw(st.sampled_from([0, 30])) if inner_bytes == 0 else 0,
                early_bytes=0 if inner_bytes is None else draw(st.sampled_from([0, 15])),
                early_again_bytes=0 if inner_bytes is None else draw(st.sampled_from([0, 9])),
                momentary_bytes=draw(st.sampled_from([0, 5, 20])),
                operands=tuple((v, draw(st.integers(1, 50))) for v in sorted(derivative_reads)),
            )
        )
    sizes = tuple(draw(st.integers(1, 50)) for _ in range(made))
    kinds = [draw(st.sampled_from(["remade", "passing", "fused"])) for _ in range(made)]
    pairs = list(zip(sizes, kinds, strict=True))
    return CostGraph(
        nodes=tuple(nodes),
        sizes=sizes,
        recomputed_bytes=tuple(size if kind == "remade" else 0 for size, kind in pairs),
        passing_bytes=tuple(size if kind == "passing" else 0 for size, kind in pairs),
        may_save=(True,) * made,
        names=tuple((k, node.makes.index(v)) for k, node in enumerate(nodes) for v in node.makes),
    )


@st.composite
def ways_of(draw, graph):
    """Ways to keep the inside of the constructs of a graph that hold something."""
    found = {}
    for node in graph.nodes:
        if node.inner_bytes is not None and draw(st.booleans()):
            saved = draw(st.lists(st.integers(0, 40), min_size=1, max_size=3))
            found[node.position] = [
                Option(
                    size + draw(st.integers(0, 20)),
                    size,
                    draw(st.integers(0, 20)),
                    made(Loop(node.position, (LoopPart(k, Stages(())),))),
                )
                for k, size in enumerate(saved, 1)
            ]
    return found


class _Rows:
    """A linear program, written down variable by variable and row by row."""

    def __init__(self):
        self.names: dict[tuple, int] = {}
        self.entries: list[tuple[int, int, float]] = []
        self.most: list[float] = []

    def var(self, *name):
        return self.names.setdefault(name, len(self.names))

    def at_most(self, bound, *terms):
        """The sum of these (factor, variable) is no more than the bound."""
        self.entries += [(len(self.most), var, factor) for factor, var in terms]
        self.most.append(bound)

    def least(self, costs, seconds):
        """The least of these (factor, variable), as far as it is proven; `None` if none exists."""
        count = len(self.names)
        rows, columns, factors = zip(*self.entries, strict=True)
        cost = np.zeros(count)
        for factor, var in costs:
            cost[var] += factor
        found = milp(
            cost,
            integrality=np.ones(count),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(
                coo_array((factors, (rows, columns)), (len(self.most), count)).tocsr(),
                -np.inf,
                np.array(self.most),
            ),
            options={"time_limit": seconds, "mip_rel_gap": 0.0},
        )
        return None if found.status == 2 else found.mip_dual_bound


def least_cost_anywhere(graph: CostGraph, budget: int, seconds: float = 60.0):
    """The least cost with which any schedule fits, which may run anything again anywhere.

    Every equation makes one value. There is a stage for every equation, the last first, in which
    its derivative is taken. Before it anything may be recomputed from what is there, and anything
    be dropped; what is there never takes more than the budget, with the cotangents of the stage.

    Source: Jain et al., "Checkmate", arXiv 1910.02653, sec. 4, with the forward pass left out.
    """
    rows, nodes, sizes = _Rows(), graph.nodes, graph.sizes
    stages = range(len(nodes))
    for t in stages:
        last = len(nodes) - 1 - t
        there = lambda v, t=t: rows.var("there", t, v)  # noqa: E731
        made = lambda v, t=t: rows.var("made", t, v)  # noqa: E731
        dropped = lambda v, by, t=t: rows.var("dropped", t, v, by)  # noqa: E731
        before = [(sizes[v], there(v)) for v in range(last + 1)]
        limit = budget - nodes[last].momentary_bytes
        rows.at_most(limit, *before)
        for k in range(last + 1):
            rows.at_most(1, (1, there(k)), (1, made(k)))
            if nodes[k].runs_once:
                rows.at_most(0, (1, made(k)))
            for v in nodes[k].reads:
                rows.at_most(0, (1, made(k)), (-1, made(v)), (-1, there(v)))
            if k in nodes[last].derivative_reads:
                rows.at_most(-1, (-1, there(k)), (-1, made(k)))
            if k < last:
                later = rows.var("there", t + 1, k)
                rows.at_most(0, (1, later), (-1, there(k)), (-1, made(k)))
            before.append((sizes[k], made(k)))
            rows.at_most(limit, *before)
            for v in (*nodes[k].reads, k):
                if v in nodes[last].derivative_reads:
                    continue
                drop = dropped(v, k)
                rows.at_most(0, (1, drop), (-1, made(k)))
                if v < last:
                    rows.at_most(1, (1, drop), (1, rows.var("there", t + 1, v)))
                for reader in range(k + 1, last + 1):
                    if v in nodes[reader].reads:
                        rows.at_most(1, (1, drop), (1, made(reader)))
                before.append((-sizes[v], drop))
    costs = [(nodes[v].cost, rows.var("made", t, v)) for t in stages for v in range(len(nodes) - t)]
    return rows.least(costs, seconds)


def chain_like(rng, count, skips):
    """A deep graph of products and activations with some skips, as a network has them."""
    nodes = []
    for k in range(count):
        reads = [k - 1] if k else []
        if k > 2 and rng.random() < skips:
            reads.append(int(rng.integers(0, k - 1)))
        is_product = k % 2 == 0
        nodes.append(
            CostNode(
                position=k,
                reads=tuple(reads),
                makes=(k,),
                derivative_reads=frozenset(reads if is_product else [k]),
                cost=int(rng.integers(50, 150)) if is_product else int(rng.integers(1, 10)),
                inner_bytes=None,
                active=True,
                runs_once=False,
                has_effects=False,
                momentary_bytes=int(rng.integers(5, 20)),
                operands=(),
            )
        )
    sizes = tuple(int(size) for size in rng.integers(10, 40, count))
    none = (0,) * count
    names = tuple((k, 0) for k in range(count))
    return CostGraph(tuple(nodes), sizes, sizes, none, (True,) * count, names)
