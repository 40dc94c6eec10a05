"""From the values that are saved to the decision: where regions begin and end."""

import itertools
from collections.abc import Container, Mapping, Sequence
from typing import Any

from jrc.remat._planner.costs.cost_graph import CostGraph
from jrc.remat._planner.plan.decision import LeftToJax, Loop, Region, Stage, Stages

Constructs = Mapping[int, Any]
"""By position, the stage of each construct that stands outside of all regions."""


def decision_of(
    graph: CostGraph,
    values: frozenset[int],
    constructs: Constructs,
    inside: Mapping[int, Loop],
) -> Stages:
    """Return the decision that saves these values: a region ends where no recomputed one is live.

    On accelerators a region of which nothing is recomputed, but what XLA fuses into its readers, is
    left to JAX: a region would write the cotangent in front of it, and what it saves.

    Args:
        graph: The cost graph.
        values: The variables that are saved.
        constructs: The constructs outside of all regions.
        inside: By position, the loops in regions whose steps have a decision.
    """
    last_reader, recomputed = recomputation(graph, values, constructs)
    dear = [
        again and not (graph.fuses_passes and _is_fused(graph, k))
        for k, again in enumerate(recomputed)
    ]
    parts: list[tuple[list[int], bool]] = []
    start, reach = 0, -1
    for k, node in enumerate(graph.nodes):
        reach = max([reach, *(last_reader.get(v, -1) for v in node.makes)])
        is_construct = node.position in constructs
        if is_construct or reach <= k:
            parts = _appended(parts, list(range(start, k + 1)), not is_construct, dear)
            start = k + 1
    stages: list[Stage] = []
    for part, is_region in parts:
        if not is_region:
            stages.append(constructs[graph.nodes[part[0]].position])
            continue
        positions = _positions(graph, part)
        if positions:
            again = tuple(sorted(graph.nodes[k].position for k in part if recomputed[k]))
            loops = tuple(inside[p] for p in again if p in inside)
            region = Region(positions, _saved(graph, part, values), again, inside=loops)
            is_light = graph.fuses_passes and not any(dear[k] for k in part)
            stages.append(LeftToJax(positions) if is_light else region)
    return _of_stages(graph, stages)


def _of_stages(graph: CostGraph, stages: Sequence[Stage]) -> Stages:
    """The decision, with what is known of the compiler."""
    return Stages(tuple(stages), without_barrier=graph.without_barrier, in_order=graph.in_order)


def decision_of_regions(
    graph: CostGraph,
    values: frozenset[int],
    constructs: Constructs,
    regions: Sequence[range],
    by_name: bool = False,
) -> Stages:
    """Return the decision that puts parts of a program under `jax.checkpoint`.

    A part of which nothing is recomputed, but what XLA fuses into its readers, is left to JAX,
    unless a policy saves by name there. So are the equations between the parts, but for constructs
    that have a decision of their own.

    Args:
        graph: The cost graph.
        values: The variables that are saved, with all that cross the borders of the parts.
        constructs: The constructs outside of all parts that have a decision.
        regions: The parts, as ranges of the nodes, in rising order.
        by_name: Whether a part saves its values by name; else only its inputs are saved.
    """
    _, recomputed = recomputation(graph, values, constructs)
    if by_name:
        values &= _read_late(graph, recomputed)
    inside = {k for each in regions for k in each}
    alone = {
        k
        for k, node in enumerate(graph.nodes)
        if k not in inside and not isinstance(constructs.get(node.position), LeftToJax | None)
    }
    ends = {k for each in regions for k in (each.start, each.stop)}
    edges = sorted({0, len(graph.nodes), *ends, *alone, *(k + 1 for k in alone)})
    stages: list[Stage] = []
    for part in itertools.starmap(range, itertools.pairwise(edges)):
        # A node without a position is the carries of a loop.
        nodes = [k for k in part if graph.nodes[k].position >= 0]
        is_region = part in regions and any(
            recomputed[k] and (by_name or not _is_fused(graph, k)) for k in nodes
        )
        if part.start in alone:
            stages.append(constructs[graph.nodes[part.start].position])
        elif not is_region:
            stages.append(LeftToJax(_positions(graph, nodes)))
        else:
            again = [k for k in nodes if recomputed[k]] if by_name else _from_inputs(graph, nodes)
            rerun = tuple(sorted(graph.nodes[k].position for k in again))
            saved = _saved(graph, nodes, values)
            stages.append(Region(_positions(graph, nodes), saved, rerun, by_name))
    return _of_stages(graph, stages)


def saved_values(graph: CostGraph, decision: Stages) -> frozenset[int]:
    """Return the variables that the regions of a decision save."""
    number = {place: v for v, place in enumerate(graph.names)}
    return frozenset(number[place] for region in decision.regions for place in region.saved)


def recomputed_cost(graph: CostGraph, decision: Stages) -> int:
    """Return the cost of all equations that regions recompute; their loops are left to JAX."""
    cost = {node.position: node.cost + node.inner_cost for node in graph.nodes}
    return sum(cost[p] for region in decision.regions for p in region.recomputed)


def saving_cost(
    graph: CostGraph, decision: Stages, values: frozenset[int], constructs: Container[int]
) -> int:
    """Return what it costs to save what regions save and a derivative or a region reads.

    Args:
        graph: The cost graph.
        decision: The decision, whose regions save some of the values; carries of a loop are too.
        values: The variables that are saved.
        constructs: Positions of the constructs outside of all regions.
    """
    if not graph.saving_costs:
        return 0
    _, recomputed = recomputation(graph, values, constructs)
    saved = (saved_values(graph, decision) | graph.carries) & _read_late(graph, recomputed)
    return sum(graph.saving_costs[v] for v in saved)


def _is_fused(graph: CostGraph, k: int) -> bool:
    """Whether XLA computes all that an equation makes inside of whatever reads it."""
    return all(map(graph.is_fused, graph.nodes[k].makes))


def recomputation(
    graph: CostGraph, values: frozenset[int], constructs: Container[int]
) -> tuple[Mapping[int, int], list[bool]]:
    """Return the last reader of every recomputed value, and which equations run again."""
    last_reader: dict[int, int] = {}
    recomputed = [False] * len(graph.nodes)
    for k in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[k]
        for v in node.late_results:
            if v not in values:
                last_reader.setdefault(v, k)
        is_needed = bool(node.inner_bytes) or not last_reader.keys().isdisjoint(node.makes)
        recomputed[k] = is_needed and node.position not in constructs
        for v in node.reads if recomputed[k] else node.late_reads:
            if v not in values:
                last_reader.setdefault(v, k)
    return last_reader, recomputed


def _read_late(graph: CostGraph, recomputed: Sequence[bool]) -> frozenset[int]:
    """The variables that a derivative reads, or an equation that runs again."""
    late = (
        node.derivative_reads.union(node.reads if recomputed[k] else ())
        for k, node in enumerate(graph.nodes)
    )
    return frozenset(v for values in late for v in values)


def _from_inputs(graph: CostGraph, part: Sequence[int]) -> list[int]:
    """The equations that a bare `jax.checkpoint` recomputes: it saves only what it is given."""
    needed: set[int] = set()
    found = []
    for k in reversed(part):
        node = graph.nodes[k]
        needed |= node.derivative_reads
        if node.inner_bytes or not needed.isdisjoint(node.makes):
            found.append(k)
            needed.update(node.reads)
    return found


def _appended(
    parts: list[tuple[list[int], bool]],
    new: list[int],
    is_region: bool,
    dear: Sequence[bool],
) -> list[tuple[list[int], bool]]:
    """The parts with one more; one that recomputes nothing dear joins the one before it."""
    if parts and parts[-1][1] and is_region:
        before = parts[-1][0]
        if not (any(dear[k] for k in before) and any(dear[k] for k in new)):
            return [*parts[:-1], (before + new, True)]
    return [*parts, (new, is_region)]


def _positions(graph: CostGraph, part: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(p for k in part if (p := graph.nodes[k].position) >= 0))


def _saved(
    graph: CostGraph, part: Sequence[int], values: frozenset[int]
) -> tuple[tuple[int, int], ...]:
    made = (v for k in part if graph.nodes[k].position >= 0 for v in graph.nodes[k].makes)
    return tuple(sorted(graph.names[v] for v in made if v in values))
