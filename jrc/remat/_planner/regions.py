"""From values that are kept to the stretches of a program that this means."""

from collections.abc import Mapping, Sequence

from jrc.remat._planner.cost_graph import CostGraph
from jrc.remat._planner.decision import Decision, Stage
from jrc.remat._planner.solver import ParetoPoint


def decision_of(graph: CostGraph, point: ParetoPoint) -> Decision:
    """The stretches of a choice: each ends where nothing that is made again crosses over."""
    until, recomputed = _made_again(graph, point)
    parts: list[tuple[list[int], bool]] = []
    start, reach = 0, -1
    for k, node in enumerate(graph.nodes):
        reach = max([reach, *(until.get(v, -1) for v in node.makes)])
        alone = node.position in point.bodies
        if alone or reach <= k:
            parts = _joined(parts, (list(range(start, k + 1)), not alone), recomputed)
            start = k + 1
    return Decision(tuple(_piece(graph, point, part, recomputed, region) for part, region in parts))


def _joined(
    parts: list[tuple[list[int], bool]], new: tuple[list[int], bool], recomputed: Sequence[bool]
) -> list[tuple[list[int], bool]]:
    """One part more; what runs nothing again goes with the part before it."""
    if parts and parts[-1][1] and new[1]:
        before = parts[-1][0]
        if not (any(recomputed[k] for k in before) and any(recomputed[k] for k in new[0])):
            return [*parts[:-1], (before + new[0], True)]
    return [*parts, new]


def _piece(
    graph: CostGraph,
    point: ParetoPoint,
    part: Sequence[int],
    recomputed: Sequence[bool],
    region: bool,
) -> Stage:
    nodes = [graph.nodes[k] for k in part]
    real = [node for node in nodes if node.position >= 0]
    return Stage(
        positions=tuple(sorted(node.position for node in real)),
        saved=tuple(
            sorted(
                graph.names[v] for node in real for v in node.makes if v in point.values and region
            )
        ),
        recomputed=tuple(sorted(graph.nodes[k].position for k in part if recomputed[k])),
        region=region,
        inside=None if region else point.bodies[nodes[0].position],
    )


def _made_again(graph: CostGraph, point: ParetoPoint) -> tuple[Mapping[int, int], list[bool]]:
    """For each value that is made again its last reader, and which equations run again."""
    until: dict[int, int] = {}
    recomputed = [False] * len(graph.nodes)
    for k in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[k]
        for v in node.derivative_reads.intersection(node.makes) - point.values:
            until.setdefault(v, k)
        alone = node.position in point.bodies
        recomputed[k] = not alone and (
            bool(node.inner_bytes) or any(v in until for v in node.makes)
        )
        for v in node.reads:
            if (recomputed[k] or v in node.derivative_reads) and v not in point.values:
                until.setdefault(v, k)
    return until, recomputed
