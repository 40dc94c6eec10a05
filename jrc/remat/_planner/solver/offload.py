"""Which saved values of a loop's body go to the host's memory: the third action of a plan.

Plans of the body are solved first. Of some of them, sets of saved values are moved: those that are
made first, which have the longest way back. What that costs is the time that the device waits for
copies, in the unit of costs:

    forward    a copy starts when its value is made, and the step ends with the last copy
    backward   copies start with the step, in the order in which regions read them

Copies run one after another, each direction on its own, beside the computation. The model assumes
no copies across steps, so that a step waits for the values that its first region reads.

Only values inside of loops are moved. Without a loop XLA delays a copy to the host until the copy
back: the device's peak does not fall. Figures are in docs/plan.md.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from jrc.remat._planner.costs.cost_graph import CostGraph
from jrc.remat._planner.plan.decision import Region, Stages
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._planner.solver.decisions import recomputation, saved_values
from jrc.remat._planner.solver.option import Option, spread_options
from jrc.remat._planner.solver.option_of_set import option_of_decision

Options = Mapping[int, Sequence[Option]]
Reads = Mapping[int, Sequence[tuple[int, int]]]
"""For each value, and each region that reads it, the nodes between which it is there again."""


def with_offloaded(
    graph: CostGraph,
    options: Options,
    front: Sequence[Option],
    times: int,
    may_move: Sequence[bool],
    copy_bandwidth: float,
) -> list[Option]:
    """Return the front of a loop's body, with options of which some values lie on the host.

    Options without such values stay, dominated or not: a manual plan has none.

    Args:
        graph: The cost graph of the body.
        options: By position, the options of constructs inside of it.
        front: Its front, the leanest first.
        times: The steps of the loop.
        may_move: Whether each value is of a type that can be moved.
        copy_bandwidth: Bytes per second of copies.
    """
    found: list[Option] = []
    for option in spread_options(front, graph.cost * times, SETTINGS.offloaded_points):
        body = _Body.of(graph, option.stages)
        reads = _moveable(graph, body, may_move)
        for values in _prefixes(graph, reads):
            chosen = {v: reads[v] for v in values}
            moved = _moved(graph, options, option, body, times, chosen, copy_bandwidth)
            found += [] if moved is None else [moved]
    found = [each for each in _front([*front, *found]) if each.host]
    return sorted([*front, *found], key=lambda each: (each.peak, each.cost))


@dataclasses.dataclass(frozen=True)
class _Body:
    """A decision for the body of a loop, in the terms of its cost graph.

    Attributes:
        saved: The variables that it saves, carries among them.
        recomputed: For each node whether it runs again.
        regions: For each node the number of its region; `None` outside of all regions.
    """

    saved: frozenset[int]
    recomputed: Sequence[bool]
    regions: Sequence[int | None]

    @classmethod
    def of(cls, graph: CostGraph, decision: Stages) -> "_Body":
        """Return a decision in the terms of a graph."""
        stages = list(enumerate(decision.stages))
        of = {p: n for n, stage in stages if isinstance(stage, Region) for p in stage.equations}
        saved = saved_values(graph, decision) | graph.carries
        outside = {p for _, stage in stages if not isinstance(stage, Region)
                   for p in stage.equations}  # fmt: skip
        _, recomputed = recomputation(graph, saved, outside)
        regions = [of.get(node.position) for node in graph.nodes]
        return cls(saved, recomputed, regions)


def _moveable(
    graph: CostGraph, body: _Body, may_move: Sequence[bool]
) -> dict[int, list[tuple[int, int]]]:
    """The saved values that can be moved, in program order, with the regions that read them.

    A value that the backward pass reads outside of all regions stays: JAX saves it on the device.
    """
    regions, recomputed = body.regions, body.recomputed
    readers: dict[int, list[int]] = {}
    for k, node in enumerate(graph.nodes):
        for v in node.derivative_reads.union(node.reads if recomputed[k] else ()):
            readers.setdefault(v, []).append(k)
    least = SETTINGS.offloaded_share * sum(graph.sizes[v] for v in body.saved)
    found = {}
    for v in (v for node in graph.nodes for v in node.makes):
        within = {regions[k] for k in readers.get(v, ())}
        if not may_move[v] or v not in body.saved or not within or None in within:
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
    option: Option,
    body: _Body,
    times: int,
    reads: Reads,
    copy_bandwidth: float,
) -> Option | None:
    """The option with these values on the host."""
    back = _fetched_bytes(graph, reads)
    nodes = tuple(
        dataclasses.replace(node, momentary_bytes=node.momentary_bytes + size)
        for node, size in zip(graph.nodes, back, strict=True)
    )
    sizes = tuple(0 if v in reads else size for v, size in enumerate(graph.sizes))
    there = dataclasses.replace(graph, nodes=nodes, sizes=sizes)
    on_device = option_of_decision(there, option.stages, options, times)
    if on_device is None:
        return None
    copied = sum(graph.sizes[v] * len(regions) for v, regions in reads.items())
    waited = waiting_seconds(graph, body.recomputed, reads, copy_bandwidth)
    copies = SETTINGS.hidden_copy_price * (2 * copied) / copy_bandwidth
    waits = graph.unit.of_seconds(waited + copies) * times
    # A copy on its way has a buffer beside the value.
    buffer = max(graph.sizes[v] for v in reads)
    offloaded = tuple(sorted(graph.names[v] for v in reads))
    decision = functools.partial(dataclasses.replace, option.stages, offloaded=offloaded)
    return dataclasses.replace(
        option,
        peak=on_device.peak + buffer,
        saved=on_device.saved,
        cost=option.cost + waits,
        make_decision=decision,
        host=option.host + copied * times,
    )


def _fetched_bytes(graph: CostGraph, reads: Reads) -> list[int]:
    """For each node, the bytes of moved values that are back while it is differentiated."""
    back = [0] * len(graph.nodes)
    for v, regions in reads.items():
        for first, last in regions:
            for k in range(first, last + 1):
                back[k] += graph.sizes[v]
    return back


def waiting_seconds(
    graph: CostGraph, recomputed: Sequence[bool], reads: Reads, copy_bandwidth: float
) -> float:
    """Return how long a step waits for copies, in the forward and the backward pass.

    Args:
        graph: The cost graph of the body.
        recomputed: For each node whether it runs again.
        reads: The values that are moved, with the regions that read them.
        copy_bandwidth: Bytes per second of copies.
    """
    forward = [graph.unit.seconds(node.forward_cost) for node in graph.nodes]
    clock = out = 0.0
    for node, duration in zip(graph.nodes, forward, strict=True):
        clock += duration
        for v in (v for v in node.makes if v in reads):
            out = max(out, clock) + graph.sizes[v] * len(reads[v]) / copy_bandwidth
    waited = max(out - clock, 0.0)
    arrives: dict[int, float] = {}
    here = 0.0
    copies = [(last, v) for v, regions in reads.items() for _, last in regions]
    for last, v in sorted(copies, reverse=True):
        here += graph.sizes[v] / copy_bandwidth
        arrives[last] = here
    clock = 0.0
    for k in range(len(graph.nodes) - 1, -1, -1):
        if k in arrives and arrives[k] > clock:
            waited += arrives[k] - clock
            clock = arrives[k]
        clock += (2 * graph.nodes[k].active + recomputed[k]) * forward[k]
    return waited


def _front(options: Sequence[Option]) -> list[Option]:
    """The options with rising peak and falling cost."""
    found: list[Option] = []
    for option in sorted(options, key=lambda each: (each.peak, each.cost, each.host)):
        if not found or option.cost < found[-1].cost:
            found.append(option)
    return found
