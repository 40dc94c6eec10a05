"""From values that are kept to the stretches of a program that this means."""

from collections.abc import Mapping, Sequence

from jrc.remat._planner.cost_graph import Graph
from jrc.remat._planner.decision import Choice, Piece
from jrc.remat._planner.solver import Point


def choice_of(graph: Graph, point: Point) -> Choice:
    """The stretches of a choice: each ends where nothing that is made again crosses over."""
    until, again = _made_again(graph, point)
    parts: list[tuple[list[int], bool]] = []
    start, reach = 0, -1
    for k, node in enumerate(graph.nodes):
        reach = max([reach, *(until.get(v, -1) for v in node.makes)])
        alone = node.position in point.bodies
        if alone or reach <= k:
            parts = _joined(parts, (list(range(start, k + 1)), not alone), again)
            start = k + 1
    return Choice(tuple(_piece(graph, point, part, again, region) for part, region in parts))


def _joined(
    parts: list[tuple[list[int], bool]], new: tuple[list[int], bool], again: Sequence[bool]
) -> list[tuple[list[int], bool]]:
    """One part more; what runs nothing again goes with the part before it."""
    if parts and parts[-1][1] and new[1]:
        before = parts[-1][0]
        if not (any(again[k] for k in before) and any(again[k] for k in new[0])):
            return [*parts[:-1], (before + new[0], True)]
    return [*parts, new]


def _piece(
    graph: Graph, point: Point, part: Sequence[int], again: Sequence[bool], region: bool
) -> Piece:
    nodes = [graph.nodes[k] for k in part]
    real = [node for node in nodes if node.position >= 0]
    return Piece(
        positions=tuple(sorted(node.position for node in real)),
        held=tuple(
            sorted(
                graph.names[v] for node in real for v in node.makes if v in point.values and region
            )
        ),
        again=tuple(sorted(graph.nodes[k].position for k in part if again[k])),
        region=region,
        inside=None if region else point.bodies[nodes[0].position],
    )


def _made_again(graph: Graph, point: Point) -> tuple[Mapping[int, int], list[bool]]:
    """For each value that is made again its last reader, and which equations run again."""
    until: dict[int, int] = {}
    again = [False] * len(graph.nodes)
    for k in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[k]
        for v in node.needs.intersection(node.makes) - point.values:
            until.setdefault(v, k)
        alone = node.position in point.bodies
        again[k] = not alone and (bool(node.opaque) or any(v in until for v in node.makes))
        for v in node.reads:
            if (again[k] or v in node.needs) and v not in point.values:
                until.setdefault(v, k)
    return until, again
