"""Which saved values of a loop's body go to the host's memory: the third action of a plan.

Plans of the body are solved first. Of some of them, sets of saved values are moved: those that are
made first, which have the longest way back. What that costs is the time that the device waits for
copies, as FLOPs that it could compute meanwhile:

    forward    a copy starts when its value is made, and the step ends with the last copy
    backward   copies start with the step, in the order in which regions read them

Copies run one after another, each direction on its own, beside the computation. The model assumes
no copies across steps, so that a step waits for the values that its first region reads.

Only values inside of loops are moved. Without a loop XLA delays a copy to the host until the copy
back: the device's peak does not fall. Figures are in docs/plan.md.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from jrc.remat._planner.costs.cost_graph import CostGraph
from jrc.remat._planner.costs.host_link import HostLink
from jrc.remat._planner.plan.decision import Decision
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._planner.solver.solver import InnerOption, ParetoPoint, solve, spread_evenly
from jrc.remat._planner.solver.stages import decision_of, recomputation

Options = Mapping[int, Sequence[InnerOption]]
Reads = Mapping[int, Sequence[tuple[int, int]]]
"""For each value, and each region that reads it, the nodes between which it is there again."""


def with_offloaded(
    graph: CostGraph,
    options: Options,
    points: Sequence[ParetoPoint],
    times: int,
    may_move: Sequence[bool],
    link: HostLink,
) -> list[ParetoPoint]:
    """Return the front of a loop's body, with points of which some values lie on the host.

    Points without such values stay, dominated or not: a way by hand has none.

    Args:
        graph: The cost graph of the body.
        options: By position, the options of constructs inside of it.
        points: Its front, the leanest first.
        times: The steps of the loop.
        may_move: Whether each value is of a type that can be moved.
        link: What copies cost.
    """
    found: list[ParetoPoint] = []
    for point in spread_evenly(points, graph.flops, SETTINGS.offloaded_points):
        regions = _regions(graph, decision_of(graph, point))
        reads = _moveable(graph, point, regions, may_move)
        for values in _prefixes(graph, reads):
            chosen = {v: reads[v] for v in values}
            found += _moved(graph, options, point, times, chosen, link)
    found = [each for each in _front([*points, *found]) if each.on_host]
    return sorted([*points, *found], key=lambda each: (each.peak, each.flops))


def priced(points: Iterable[ParetoPoint], options: Options, times: int) -> list[ParetoPoint]:
    """Return points with what the options that they chose move to the host."""
    by_body = {
        (k, id(option.body)): option
        for k, some in options.items()
        for option in some
        if option.host
    }
    found = []
    for point in points:
        chosen = [by_body.get((k, id(body))) for k, body in point.bodies.items()]
        host = sum(option.host for option in chosen if option)
        waits = sum(option.waits for option in chosen if option)
        found.append(dataclasses.replace(point, host=host * times, waits=waits))
    return found


def _regions(graph: CostGraph, decision: Decision) -> list[int | None]:
    """For each node the number of its region; `None` outside of all regions."""
    of = {p: n for n, stage in enumerate(decision.stages) if stage.region for p in stage.positions}
    return [of.get(node.position) for node in graph.nodes]


def _moveable(
    graph: CostGraph, point: ParetoPoint, regions: Sequence[int | None], may_move: Sequence[bool]
) -> dict[int, list[tuple[int, int]]]:
    """The saved values that can be moved, in program order, with the regions that read them.

    A value that the backward pass reads outside of all regions stays: JAX saves it on the device.
    """
    _, recomputed = recomputation(graph, point)
    readers: dict[int, list[int]] = {}
    for k, node in enumerate(graph.nodes):
        for v in node.derivative_reads.union(node.reads if recomputed[k] else ()):
            readers.setdefault(v, []).append(k)
    least = SETTINGS.offloaded_share * sum(graph.sizes[v] for v in point.values)
    found = {}
    for v in (v for node in graph.nodes for v in node.makes):
        within = {regions[k] for k in readers.get(v, ())}
        if not may_move[v] or v not in point.values or not within or None in within:
            continue
        if graph.sizes[v] >= max(least, 1):
            each = [[k for k in readers[v] if regions[k] == region] for region in within]
            found[v] = sorted(_while_read(some, regions, recomputed) for some in each)
    return found


def _while_read(
    reading: Sequence[int], regions: Sequence[int | None], recomputed: Sequence[bool]
) -> tuple[int, int]:
    """The first node that reads a value, and the last; recomputation reads before all others do."""
    end = max(k for k, region in enumerate(regions) if region == regions[reading[0]])
    return reading[0], end if any(recomputed[k] for k in reading) else reading[-1]


def _prefixes(graph: CostGraph, reads: Reads) -> list[tuple[int, ...]]:
    """Sets of values, those made first before the others, evenly spread by bytes."""
    values, total, done = list(reads), sum(graph.sizes[v] for v in reads), 0
    found = {}
    for n, v in enumerate(values, 1):
        done += graph.sizes[v]
        level = min(done * SETTINGS.offloaded_levels // max(total, 1), SETTINGS.offloaded_levels)
        found[level] = tuple(values[:n])
    return list(dict.fromkeys(found.values()))


def _moved(
    graph: CostGraph,
    options: Options,
    point: ParetoPoint,
    times: int,
    reads: Reads,
    link: HostLink,
) -> list[ParetoPoint]:
    """The point with these values on the host."""
    chosen = {
        k: [option for option in some if option.body is point.bodies.get(k)]
        for k, some in options.items()
        if k in point.bodies
    }
    back = _fetched_bytes(graph, reads)
    nodes = tuple(
        dataclasses.replace(node, cotangent_bytes=node.cotangent_bytes + size)
        for node, size in zip(graph.nodes, back, strict=True)
    )
    sizes = tuple(0 if v in reads else size for v, size in enumerate(graph.sizes))
    there = dataclasses.replace(graph, nodes=nodes, sizes=sizes)
    copied = sum(graph.sizes[v] * len(regions) for v, regions in reads.items())
    waited = waiting_seconds(graph, point, reads, link)
    waits = link.as_flops(waited + SETTINGS.hidden_copy_price * link.seconds(2 * copied))
    # A copy on its way has a buffer beside the value.
    buffer = max(graph.sizes[v] for v in reads)
    return [
        dataclasses.replace(
            point,
            peak=each.peak + buffer,
            saved=each.saved,
            flops=point.flops + waits,
            on_host=frozenset(reads),
            host=point.host + copied * times,
            waits=point.waits + waits,
        )
        for each in solve(there, chosen, times, saved=point.values)[:1]
    ]


def _fetched_bytes(graph: CostGraph, reads: Reads) -> list[int]:
    """For each node, the bytes of moved values that are back while it is differentiated."""
    back = [0] * len(graph.nodes)
    for v, regions in reads.items():
        for first, last in regions:
            for k in range(first, last + 1):
                back[k] += graph.sizes[v]
    return back


def waiting_seconds(graph: CostGraph, point: ParetoPoint, reads: Reads, link: HostLink) -> float:
    """Return how long a step waits for copies, in the forward and the backward pass.

    Args:
        graph: The cost graph of the body.
        point: Its save set.
        reads: The values that are moved, with the regions that read them.
        link: What copies cost.
    """
    _, recomputed = recomputation(graph, point)
    forward = [node.flops / link.flops for node in graph.nodes]
    clock = out = 0.0
    for node, duration in zip(graph.nodes, forward, strict=True):
        clock += duration
        for v in (v for v in node.makes if v in reads):
            out = max(out, clock) + link.seconds(graph.sizes[v] * len(reads[v]))
    waited = max(out - clock, 0.0)
    arrives: dict[int, float] = {}
    here = 0.0
    copies = [(last, v) for v, regions in reads.items() for _, last in regions]
    for last, v in sorted(copies, reverse=True):
        here += link.seconds(graph.sizes[v])
        arrives[last] = here
    clock = 0.0
    for k in range(len(graph.nodes) - 1, -1, -1):
        if k in arrives and arrives[k] > clock:
            waited += arrives[k] - clock
            clock = arrives[k]
        clock += (2 * graph.nodes[k].active + recomputed[k]) * forward[k]
    return waited


def _front(points: Sequence[ParetoPoint]) -> list[ParetoPoint]:
    """The points with rising peak and falling FLOPs."""
    found: list[ParetoPoint] = []
    for point in sorted(points, key=lambda each: (each.peak, each.flops, each.host)):
        if not found or point.flops < found[-1].flops:
            found.append(point)
    return found
