"""Manual plans: what a person would write, as options beside those of the solver.

Two kinds of them: a policy of `jax.checkpoint` that saves products or marked values, and the
program cut into regions, each under a `jax.checkpoint`. Cuts are where few bytes cross from the
equations in front to those behind, at a few scales, and behind the lines where layers end.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jrc._jaxpr import Program, facts_of, inner_programs, primitive_name, walk
from jrc.remat._planner.costs.cost_graph import CostGraph, CostNode
from jrc.remat._planner.costs.lookups import is_lookup
from jrc.remat._planner.costs.memory_model import kept_by_xla
from jrc.remat._planner.plan.decision import LeftToJax, Region, Stages
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._planner.solver.cuts import Place, cuts, repeated_cuts
from jrc.remat._planner.solver.decisions import decision_of_regions, recomputed_cost, saving_cost
from jrc.remat._planner.solver.option import Family, Option, made
from jrc.remat._planner.solver.option_of_set import all_left_to_jax, option_of_set
from jrc.remat._planner.solver.save_sets import (
    IN_SEGMENTS,
    MARKS,
    NOTHING_SAVED,
    distinct,
    marked_values,
    policy_sets,
)

Options = Mapping[int, Sequence[Option]]
Sets = Mapping[str, frozenset[int]]
"""What policies save, by what that is called."""
Regions = tuple[range, ...]
"""Parts of a program, as ranges of the nodes of its graph."""

_PLACES: Mapping[Place, str] = {"shared": "", "first": ", cut early", "last": ", cut late"}


def manual_options(program: Program, graph: CostGraph, options: Options) -> list[Option]:
    """Return the manual plans of a program; of those of equal peak and nearly equal cost the first.

    Args:
        program: The program.
        graph: Its cost graph.
        options: By position, the options of constructs outside of all regions.
    """
    sets = policy_sets(program, graph)
    found = [*_by_policy(graph, options, sets), *_inside_constructs(program, graph, options)]
    windows = [k for k, node in enumerate(graph.nodes) if node.held_bytes]
    every = _all_regions(program, graph)
    alone = _all_around_products(program, graph, every) if graph.fuses_passes else []
    for name, regions in (*every, *alone):
        found += _under_checkpoints(graph, name, regions, sets)
    for name, regions in _all_regions(program, graph, windows) if windows else ():
        found += _under_checkpoints(graph, f"{name}, windows outside", regions, sets)
    bare, segmented = (_named(options, what) for what in (NOTHING_SAVED, IN_SEGMENTS))
    apart = [k for k, node in enumerate(graph.nodes) if node.position in bare]
    for name, regions in _all_regions(program, graph, apart) if bare else ():
        name = f"{name}, and every {_what(program, bare)}"
        found += _option(graph, name, regions, constructs=bare)
        if segmented:
            found += _option(graph, f"{name}, in segments", regions, constructs=bare | segmented)
    first: dict[tuple[int, int], Option] = {}
    for each in found:
        cost = round(each.cost / (SETTINGS.equal_cost * graph.cost))
        first.setdefault((each.peak, cost), each)
    return list(first.values())


def _by_policy(graph: CostGraph, options: Options, sets: Sets) -> Iterator[Option]:
    """What policies of `jax.checkpoint` save, the regions as the solver would cut them."""
    lean = {k: some[0] for k, some in options.items()}
    for name, values in distinct({"": frozenset(), **sets}).items():
        option = option_of_set(graph, values, lean | _named(options, name) if name else lean)
        title = f"{name} saved" if name else "everything recomputed"
        if option is not None:
            yield dataclasses.replace(option, name=title, family="policy")


def _all_regions(
    program: Program, graph: CostGraph, apart: Sequence[int] = ()
) -> list[tuple[str, Regions]]:
    """The ways to cut a program into regions, with a name; the last one is recomputed or not.

    What is looked up in a larger table in front of the first product, an embedding, is in no
    region: a person wraps layers. With the table behind the barrier of a region a decoder took a
    tenth longer on a v5p.

    Args:
        program: The program.
        graph: Its cost graph.
        apart: Nodes that are in no region.
    """
    count, start = len(graph.nodes), _behind_lookups(program, graph)
    found: dict[Regions, str] = {}
    marks = [k for k in _behind_marks(program, graph) if start < k < count]
    ways = [("regions between marks recomputed", marks)]
    # A layer of a product and an activation makes as much as it saves, behind the activation alone.
    scales: list[tuple[Place, Sequence[int]]] = [
        ("shared", SETTINGS.cut_ratios),
        ("first", SETTINGS.cut_ratios),
        ("last", (1,)),
    ]
    for place, ratio in ((place, ratio) for place, ratios in scales for ratio in ratios):
        places = [k for k in cuts(graph, ratio, apart, place) if k > start]
        # What lies behind the last cut may be the end of a model, or its last layer as well.
        ways += [(_name(some) + _PLACES[place], some) for some in (places, places[:-1])]
    for line, places in repeated_cuts(program, graph).items():
        some = [k for k in places if k > start]
        ways.append((f"{_name(some)}, cut behind {line}", some))
    for name, places in ways:
        whole = itertools.starmap(range, itertools.pairwise([start, *places, count]))
        regions = tuple(part for region in whole for part in _apart_from(region, apart))
        if len(regions) > 1 and places:
            for some, title in ((regions[:-1], name), (regions, f"{name}, the last too")):
                if some not in found:
                    used = sum(each.startswith(title) for each in found.values())
                    found[some] = f"{title} ({used + 1})" if title in found.values() else title
    return [(name, regions) for regions, name in found.items()]


def _name(places: Sequence[int]) -> str:
    return f"{len(places)} regions recomputed" if len(places) > 1 else "1 region recomputed"


def _all_around_products(
    program: Program, graph: CostGraph, every: Iterable[tuple[str, Regions]]
) -> list[tuple[str, Regions]]:
    """The ways to wrap products alone, as a network between splines, or in a simulation, is.

    Each region goes from its first product to its last one, where the equations outside of that
    write more than half as many bytes as those inside.
    """
    is_product = [_is_product(program, node) for node in graph.nodes]
    found: dict[Regions, str] = {}
    for name, regions in every:
        parts = []
        for region in regions:
            products = [k for k in region if is_product[k]]
            if products:
                parts.append(range(products[0], products[-1] + 1))
        inside = sum(_written(graph, part) for part in parts)
        if 0 < 3 * inside < 2 * sum(_written(graph, region) for region in regions):
            found.setdefault(tuple(parts), f"{name}, products alone")
    return [(name, regions) for regions, name in found.items()]


def _written(graph: CostGraph, part: range) -> int:
    """Bytes of what a part of the program makes and XLA does not fuse away."""
    made = (v for k in part for v in graph.nodes[k].makes)
    return sum(graph.sizes[v] for v in made if not graph.is_fused(v))


def _is_product(program: Program, node: CostNode) -> bool:
    """Whether an equation is differentiated and multiplies matrices, or one inside of it does."""
    if node.position < 0 or not node.active:
        return False
    eqn = program.eqns[program.steps[node.position]]
    inside = (each for inner in inner_programs(eqn) for each, _ in walk(inner))
    return any(facts_of(each).is_contraction for each in (eqn, *inside))


def _under_checkpoints(
    graph: CostGraph, name: str, regions: Regions, sets: Sets
) -> Iterator[Option]:
    """A `jax.checkpoint` around each region: bare, and with products saved.

    Constructs stand in the regions, and are recomputed with them.
    """
    yield from _option(graph, name, regions)
    inside = {v for region in regions for k in region for v in graph.nodes[k].makes}
    products = {what: values & inside for what, values in sets.items() if what != MARKS}
    for what, values in distinct(products).items():
        if values:
            yield from _option(graph, f"{name}, {what} saved", regions, values)


def _option(
    graph: CostGraph,
    name: str,
    regions: Regions,
    saved: frozenset[int] = frozenset(),
    constructs: Mapping[int, Option] | None = None,
) -> Iterator[Option]:
    """A `jax.checkpoint` around each region, which saves some values; the rest left to JAX.

    Constructs between the regions run under the option that `constructs` has for their position.
    """
    constructs = constructs or {}
    inside = {k for region in regions for k in region}
    outside = [node for k, node in enumerate(graph.nodes) if k not in inside]
    borders = sorted({k for each in regions for k in (each.start, each.stop)})
    values = _crossing_values(graph, borders) | kept_by_xla(graph, outside) | saved
    left = {**all_left_to_jax(outside), **constructs}
    option = option_of_set(_once(graph, constructs), values, left)
    if option is None:
        return
    # What a region saves is what others read; with names also what it reads itself.
    stages = {k: option.decision for k, option in constructs.items()}
    decision = decision_of_regions(graph, values, stages, regions, by_name=bool(saved))
    again = {p for region in decision.regions for p in region.recomputed}
    if again and not any(node.runs_once and node.position in again for node in graph.nodes):
        cost = sum(each.cost for each in left.values())
        cost += recomputed_cost(graph, decision) + saving_cost(graph, decision, values, stages)
        family: Family = "all regions" if len(graph.nodes) - 1 in inside else "regions"
        changes = {"cost": cost, "make_decision": made(decision), "family": family}
        yield dataclasses.replace(option, name=name, **changes)


def _inside_constructs(program: Program, graph: CostGraph, options: Options) -> Iterator[Option]:
    """The body of every loop, or every branch, under `jax.checkpoint`; the rest left to JAX."""
    chosen = {k for k, some in options.items() if any(each.name for each in some)}
    if not chosen:
        return
    whole = f"every {_what(program, chosen)} recomputed"
    # What runs once stays outside of regions, where only these options are left.
    graph = _once(graph, chosen)
    names = dict.fromkeys(each.name for k in sorted(chosen) for each in options[k] if each.name)
    bare = _named(options, NOTHING_SAVED)
    left = {**all_left_to_jax(graph.nodes), **{k: some[0] for k, some in options.items()}}
    kept = kept_by_xla(graph, graph.nodes)
    for what in names:
        # A construct that has nothing of what is saved is under a bare `jax.checkpoint`.
        titles = {NOTHING_SAVED: whole, IN_SEGMENTS: f"{whole}, in segments"}
        name = titles.get(what, f"{whole}, {what} saved")
        option = option_of_set(graph, kept, left | bare | _named(options, what))
        if option is not None:
            yield _without_regions(graph, dataclasses.replace(option, name=name, family="policy"))


def _without_regions(graph: CostGraph, option: Option) -> Option:
    """The constructs of an option, and no region around them.

    There XLA may fuse what JAX saves into its readers; in a region saved values are written.
    """
    stages = Stages(
        tuple(
            LeftToJax(each.equations) if isinstance(each, Region) else each
            for each in option.stages.stages
        )
    )
    again = {p for region in option.stages.regions for p in region.recomputed}
    cost = option.cost - sum(node.cost for node in graph.nodes if node.position in again)
    return dataclasses.replace(option, cost=cost, make_decision=made(stages))


def _named(options: Options, name: str) -> dict[int, Option]:
    """The option of each construct that has this name."""
    return {k: each for k, some in options.items() for each in some if each.name == name}


def _what(program: Program, positions: Iterable[int]) -> str:
    """What the bodies of these constructs are called: `step`, `branch`."""
    names = {primitive_name(program.eqns[program.steps[k]]) for k in positions}
    return "branch" if names == {"cond"} else "step"


def _once(graph: CostGraph, positions: Iterable[int]) -> CostGraph:
    """The graph, its nodes at these positions outside of all regions."""
    chosen = set(positions)
    if not chosen:
        return graph
    nodes = [
        dataclasses.replace(node, runs_once=node.runs_once or node.position in chosen)
        for node in graph.nodes
    ]
    return dataclasses.replace(graph, nodes=tuple(nodes))


def _crossing_values(graph: CostGraph, borders: Sequence[int]) -> frozenset[int]:
    """The values that are made in front of one of these places and read behind it."""
    last = graph.last_readers
    found: set[int] = set()
    for k, node in enumerate(graph.nodes):
        i = bisect.bisect(borders, k)
        if i < len(borders):
            found.update(v for v in node.makes if borders[i] <= last.get(v, -1))
    return frozenset(found)


def _behind_lookups(program: Program, graph: CostGraph) -> int:
    """The place behind lookups in arguments, in front of the first product; 0 without them.

    It is the first one where a single value with a derivative is read further on: of an embedding
    of tokens and one of positions it is behind their sum. Products without a derivative, as of
    angles and positions, do not count.
    """
    last = graph.last_readers
    place, is_single = 0, False
    live: set[int] = set()
    for k, node in enumerate(graph.nodes):
        if node.position < 0:
            continue
        if _is_product(program, node):
            return place
        made = node.makes if node.active else ()
        live = {v for v in (*live, *made) if last.get(v, -1) > k}
        eqn = program.eqns[program.steps[node.position]]
        if node.active and is_lookup(program, eqn):
            place, is_single = k + 1, len(live) == 1
        elif place and not is_single and len(live) == 1:
            place, is_single = k + 1, True
    return 0


def _apart_from(region: range, nodes: Sequence[int]) -> Iterator[range]:
    """The parts of a region between nodes that are left out of it."""
    start = region.start
    for k in (*(k for k in nodes if k in region), region.stop):
        if start < k:
            yield range(start, k)
        start = k + 1


def _behind_marks(program: Program, graph: CostGraph) -> list[int]:
    """The places behind marked values."""
    marked = marked_values(program, graph)
    return [k + 1 for k, node in enumerate(graph.nodes) if marked.intersection(node.makes)]
