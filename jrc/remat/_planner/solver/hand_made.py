"""What a person would try by hand, in the planner's own terms.

These ways stand among the candidates of every plan with their predicted cost. The leanest of them
are compiled before a budget is refused. Blocks are those of `blocks`, each under a bare
`jax.checkpoint`, or under one that saves products.
"""

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from jrc._jaxpr import Program, facts_of, primitive_name
from jrc.remat._planner.costs.cost_graph import CostGraph
from jrc.remat._planner.costs.memory_model import kept_by_xla
from jrc.remat._planner.plan.decision import Decision, Stage
from jrc.remat._planner.solver.blocks import crossing_values, find_blocks
from jrc.remat._planner.solver.save_sets import MARKS, distinct, marked_values, policy_sets
from jrc.remat._planner.solver.solver import (
    IN_CHUNKS,
    NOTHING_SAVED,
    InnerOption,
    ParetoPoint,
    solve,
)
from jrc.remat._planner.solver.stages import decision_of, decision_of_blocks, recomputed_flops

Regions = Sequence[range]
"""Parts of a program, as ranges of the nodes of its graph."""


@dataclasses.dataclass(frozen=True)
class HandMade:
    """A way to recompute by hand.

    Attributes:
        name: What it is called.
        point: Its cost.
        decision: What it recomputes.
    """

    name: str
    point: ParetoPoint
    decision: Decision


def hand_made(
    program: Program,
    graph: CostGraph,
    options: Mapping[int, Sequence[InnerOption]] | None,
) -> list[HandMade]:
    """Return the ways in which a person would recompute by hand.

    Args:
        program: The program.
        graph: Its cost graph.
        options: By position, the options of constructs outside of all regions.
    """
    found = []
    for name, values in _save_sets(program, graph).items():
        for point in solve(graph, options, saved=values)[:1]:
            found.append(HandMade(name, point, decision_of(graph, point)))
    found += _inside_constructs(program, graph, options or {})
    for name, regions in _regions(program, graph).items():
        found += _under_checkpoints(graph, name, regions)
        found += _with_constructs(program, graph, name, regions, options or {})
    return found + _blocks_with_products(program, graph)


def _under_checkpoints(
    graph: CostGraph,
    name: str,
    regions: Regions,
    saved: frozenset[int] = frozenset(),
    bodies: Mapping[int, InnerOption] | None = None,
) -> list[HandMade]:
    """A `jax.checkpoint` around each region, which saves some values; the rest left to JAX.

    Constructs between the regions run under the option that `bodies` has for their position.
    """
    bodies = bodies or {}
    inside = {k for region in regions for k in region}
    outside = [node for k, node in enumerate(graph.nodes) if k not in inside]
    borders = sorted({k for each in regions for k in (each.start, each.stop)})
    values = crossing_values(graph, borders) | kept_by_xla(graph, outside) | saved
    offered = {k: [option] for k, option in bodies.items()}
    found = []
    # A construct in a block is recomputed with it.
    for point in solve(_once(graph, bodies), offered, saved=values)[:1]:
        decision = decision_of_blocks(graph, point, regions, by_name=bool(saved))
        again = {p for stage in decision.stages for p in stage.recomputed}
        if not any(node.runs_once and node.position in again for node in graph.nodes):
            flops = sum(option.flops for option in bodies.values())
            cost = dataclasses.replace(point, flops=flops + recomputed_flops(graph, decision))
            found.append(HandMade(name, cost, decision))
    return found


def _with_constructs(
    program: Program,
    graph: CostGraph,
    name: str,
    regions: Regions,
    options: Mapping[int, Sequence[InnerOption]],
) -> list[HandMade]:
    """Each region under `jax.checkpoint`, and the bodies of constructs between them too."""
    inside = {graph.nodes[k].position for region in regions for k in region}
    bare, chunked = (
        {
            k: option
            for k, some in options.items()
            for option in some
            if option.by_hand == what and k not in inside
        }
        for what in (NOTHING_SAVED, IN_CHUNKS)
    )
    if not bare:
        return []
    name = f"{name}, and every {'branch' if _are_branches(program, bare) else 'step'}"
    found = _under_checkpoints(graph, name, regions, bodies=bare)
    if chunked:
        bodies = bare | chunked
        found += _under_checkpoints(graph, f"{name}, in chunks", regions, bodies=bodies)
    return found


def _are_branches(program: Program, positions: Iterable[int]) -> bool:
    """Whether all constructs at these positions are conditionals."""
    return {primitive_name(program.eqns[program.steps[k]]) for k in positions} == {"cond"}


def _once(graph: CostGraph, positions: Collection[int]) -> CostGraph:
    """The graph, its nodes at these positions outside of all regions."""
    nodes = [
        dataclasses.replace(node, runs_once=node.runs_once or node.position in positions)
        for node in graph.nodes
    ]
    return dataclasses.replace(graph, nodes=tuple(nodes))


def _blocks_with_products(program: Program, graph: CostGraph) -> list[HandMade]:
    """Every block under `jax.checkpoint` with a policy of JAX that saves products."""
    pools = _pools(program, graph)
    blocks = _every_block(program, graph)
    regions = [part for block in blocks for part in _apart_from(block, pools)]
    inside = {v for region in regions for k in region for v in graph.nodes[k].makes}
    sets = {
        what: values & inside
        for what, values in policy_sets(program, graph).items()
        if what != MARKS
    }
    return [
        way
        for what, values in distinct(sets).items()
        if values
        for way in _under_checkpoints(
            graph, f"every block recomputed, {what} saved", regions, values
        )
    ]


def _inside_constructs(
    program: Program, graph: CostGraph, options: Mapping[int, Sequence[InnerOption]]
) -> list[HandMade]:
    """The body of every loop, or every branch, under `jax.checkpoint`; the rest left to JAX."""
    by_hand = {
        k: {each.by_hand: each for each in some if each.by_hand} for k, some in options.items()
    }
    chosen = {k for k, some in by_hand.items() if some}
    if not chosen:
        return []
    whole = f"every {'branch' if _are_branches(program, chosen) else 'step'} recomputed"
    # What runs once stays outside of regions, where only these options are left.
    graph = _once(graph, chosen)
    found = []
    for what in dict.fromkeys(what for some in by_hand.values() for what in some):
        # A construct that has nothing of what is saved is under a bare `jax.checkpoint`.
        offered = {
            k: [some.get(what) or some.get(NOTHING_SAVED) or options[k][0]] if some else options[k]
            for k, some in by_hand.items()
        }
        names = {NOTHING_SAVED: whole, IN_CHUNKS: f"{whole}, in chunks"}
        name = names.get(what, f"{whole}, {what} saved")
        points = solve(graph, offered, saved=kept_by_xla(graph, graph.nodes))[:1]
        found += [_left_to_jax_around(graph, name, point) for point in points]
    return found


def _left_to_jax_around(graph: CostGraph, name: str, point: ParetoPoint) -> HandMade:
    """Constructs as a point has them, and no region around them.

    There XLA may fuse what JAX saves into its readers; in a region saved values are written.
    """
    decision = decision_of(graph, point)
    stages = (
        Stage(each.positions, region=False) if each.region else each for each in decision.stages
    )
    cost = dataclasses.replace(point, flops=point.flops - recomputed_flops(graph, decision))
    return HandMade(name, cost, Decision(tuple(stages)))


def _save_sets(program: Program, graph: CostGraph) -> dict[str, frozenset[int]]:
    sets = {"everything recomputed": frozenset[int]()}
    sets |= {f"{name} saved": values for name, values in policy_sets(program, graph).items()}
    return distinct(sets)


def _regions(program: Program, graph: CostGraph) -> dict[str, Regions]:
    """What a person would put under `jax.checkpoint`, part by part, by name."""
    marks = [k for k in _mark_borders(program, graph) if k < len(graph.nodes)]
    found = {
        "every mark recomputed": list(itertools.starmap(range, itertools.pairwise([0, *marks])))
    }
    blocks = _every_block(program, graph)
    found["every block recomputed"] = blocks[:-1]
    found["every block recomputed, the last too"] = blocks
    if blocks and _flops(graph, head := range(blocks[-1].stop, len(graph.nodes))):
        found["every block and the head recomputed"] = [*blocks, head]
    stride = round(math.sqrt(len(blocks)))
    if stride > 1:
        found[f"every {stride} blocks recomputed"] = _grouped(blocks, stride)
    pools = _pools(program, graph)
    unique: dict[tuple[range, ...], str] = {}
    for name, regions in found.items():
        if apart := tuple(part for region in regions for part in _apart_from(region, pools)):
            unique.setdefault(apart, name)
    return {name: list(regions) for regions, name in unique.items()}


def _every_block(program: Program, graph: CostGraph) -> list[range]:
    """The blocks of all stacks; what computes as much and stands before or between is one too."""
    found: list[range] = []
    for first, *rest in find_blocks(program, graph):
        between = range(found[-1].stop if found else 0, first.start)
        if _flops(graph, between) > _flops(graph, first) / 2:
            found.append(between)
        elif found and not _flops(graph, between):
            first = range(between.start, first.stop)
        found += [first, *rest]
    return found


def _flops(graph: CostGraph, part: range) -> int:
    return sum(graph.nodes[k].flops for k in part)


def _grouped(blocks: Regions, size: int) -> list[range]:
    """The blocks in groups of so many; those beside each other alone make a group."""
    groups: list[list[range]] = []
    for block in blocks:
        if groups and len(groups[-1]) < size and groups[-1][-1].stop == block.start:
            groups[-1].append(block)
        else:
            groups.append([block])
    return [range(group[0].start, group[-1].stop) for group in groups]


def _pools(program: Program, graph: CostGraph) -> list[int]:
    """The equations that a person leaves between blocks: pooling."""
    return [
        k
        for k, node in enumerate(graph.nodes)
        if node.position >= 0 and facts_of(program.eqns[program.steps[node.position]]).is_pooling
    ]


def _apart_from(region: range, nodes: Sequence[int]) -> Iterator[range]:
    """The parts of a region between nodes that are left out of it."""
    start = region.start
    for k in (*(k for k in nodes if k in region), region.stop):
        if start < k:
            yield range(start, k)
        start = k + 1


def _mark_borders(program: Program, graph: CostGraph) -> list[int]:
    """The places behind marked values."""
    marked = marked_values(program, graph)
    return [k + 1 for k, node in enumerate(graph.nodes) if marked.intersection(node.makes)]
