"""From the values that are saved to the stages of a decision."""

import itertools
from collections.abc import Mapping, Sequence

from jrc.remat._planner.costs.cost_graph import CostGraph
from jrc.remat._planner.plan.decision import Decision, Stage
from jrc.remat._planner.solver.solver import ParetoPoint


def decision_of(graph: CostGraph, point: ParetoPoint) -> Decision:
    """Return the decision of a point: a region ends where no recomputed value is live."""
    last_reader, recomputed = recomputation(graph, point)
    parts: list[tuple[list[int], bool]] = []
    start, reach = 0, -1
    for k, node in enumerate(graph.nodes):
        reach = max([reach, *(last_reader.get(v, -1) for v in node.makes)])
        is_construct = node.position in point.bodies
        if is_construct or reach <= k:
            parts = _appended(parts, list(range(start, k + 1)), not is_construct, recomputed)
            start = k + 1
    stages = tuple(_stage(graph, point, part, recomputed, region) for part, region in parts)
    return Decision(stages, offloaded=tuple(sorted(graph.names[v] for v in point.on_host)))


def decision_of_blocks(
    graph: CostGraph, point: ParetoPoint, regions: Sequence[range], by_name: bool = False
) -> Decision:
    """Return the decision of a person who puts parts of a program under `jax.checkpoint`.

    A part of which nothing is recomputed, but what XLA fuses into its readers, is left to JAX, as
    are the equations between the parts, but for constructs that have a decision of their own.

    Args:
        graph: The cost graph.
        point: A save set that has all values which cross the borders of the parts.
        regions: The parts, as ranges of the nodes, in rising order.
        by_name: Whether a part saves the save set's values by name; else only its inputs are saved.
    """
    _, recomputed = recomputation(graph, point)
    inside = {k for each in regions for k in each}
    alone = {
        k
        for k, node in enumerate(graph.nodes)
        if k not in inside and point.bodies.get(node.position) is not None
    }
    ends = {k for each in regions for k in (each.start, each.stop)}
    edges = sorted({0, len(graph.nodes), *ends, *alone, *(k + 1 for k in alone)})
    stages = []
    for part in itertools.starmap(range, itertools.pairwise(edges)):
        # A node without a position is the carries of a loop.
        nodes = [k for k in part if graph.nodes[k].position >= 0]
        made = [v for k in nodes for v in graph.nodes[k].makes]
        region = part in regions and any(
            recomputed[k] and not all(map(graph.is_fused, graph.nodes[k].makes)) for k in nodes
        )
        again: tuple[int, ...] = ()
        if region and by_name:
            again = tuple(sorted(graph.nodes[k].position for k in nodes if recomputed[k]))
        elif region:
            again = _recomputed_from_inputs(graph, nodes)
        saved = [graph.names[v] for v in made if v in point.values and region]
        positions = tuple(sorted(graph.nodes[k].position for k in nodes))
        body = point.bodies[positions[0]] if part.start in alone else None
        stages.append(
            Stage(positions, tuple(sorted(saved)), again, region, by_name or not region, body)
        )
    return Decision(tuple(stages))


def recomputed_flops(graph: CostGraph, decision: Decision) -> int:
    """Return the FLOPs of all equations that the regions of a decision recompute."""
    flops = {node.position: node.flops for node in graph.nodes}
    return sum(flops[p] for stage in decision.stages for p in stage.recomputed)


def _recomputed_from_inputs(graph: CostGraph, part: Sequence[int]) -> tuple[int, ...]:
    """The equations that a bare `jax.checkpoint` recomputes: it saves only what it is given."""
    needed: set[int] = set()
    found = []
    for k in reversed(part):
        node = graph.nodes[k]
        needed |= node.derivative_reads
        if node.inner_bytes or not needed.isdisjoint(node.makes):
            found.append(node.position)
            needed.update(node.reads)
    return tuple(sorted(found))


def _appended(
    parts: list[tuple[list[int], bool]],
    new: list[int],
    is_region: bool,
    recomputed: Sequence[bool],
) -> list[tuple[list[int], bool]]:
    """The parts with one more; one that recomputes nothing is merged with the one before it."""
    if parts and parts[-1][1] and is_region:
        before = parts[-1][0]
        if not (any(recomputed[k] for k in before) and any(recomputed[k] for k in new)):
            return [*parts[:-1], (before + new, True)]
    return [*parts, (new, is_region)]


def _stage(
    graph: CostGraph,
    point: ParetoPoint,
    part: Sequence[int],
    recomputed: Sequence[bool],
    region: bool,
) -> Stage:
    nodes = [graph.nodes[k] for k in part]
    real = [node for node in nodes if node.position >= 0]
    saved = (graph.names[v] for node in real for v in node.makes if v in point.values and region)
    return Stage(
        positions=tuple(sorted(node.position for node in real)),
        saved=tuple(sorted(saved)),
        recomputed=tuple(sorted(graph.nodes[k].position for k in part if recomputed[k])),
        region=region,
        inside=None if region else point.bodies[nodes[0].position],
    )


def recomputation(graph: CostGraph, point: ParetoPoint) -> tuple[Mapping[int, int], list[bool]]:
    """Return the last reader of every recomputed value, and which equations run again."""
    last_reader: dict[int, int] = {}
    recomputed = [False] * len(graph.nodes)
    for k in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[k]
        for v in node.derivative_reads.intersection(node.makes) - point.values:
            last_reader.setdefault(v, k)
        is_construct = node.position in point.bodies
        is_needed = bool(node.inner_bytes) or any(v in last_reader for v in node.makes)
        recomputed[k] = not is_construct and is_needed
        for v in node.reads:
            if (recomputed[k] or v in node.derivative_reads) and v not in point.values:
                last_reader.setdefault(v, k)
    return last_reader, recomputed
