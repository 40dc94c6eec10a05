"""Where a program is cut into regions: places where few bytes cross to the equations behind."""

import collections
import math
from collections.abc import Collection, Mapping
from typing import Literal

from jrc._jaxpr import Program, label
from jrc.remat._planner.costs.cost_graph import CostGraph
from jrc.remat._planner.settings import SETTINGS

Place = Literal["shared", "first", "last"]


def cuts(
    graph: CostGraph, ratio: int, apart: Collection[int] = (), place: Place = "shared"
) -> list[int]:
    """Return places to cut a program, such that each region makes so many times what it saves.

    From the last cut on, the next one is where few bytes are made in front of it and read behind:
    the least of all places from the first one on at which the region has made `ratio` times as
    much, and up to half as much again. Of equal ones it is the first, the last, or behind a value
    that several equations read, as what a layer with a residual connection returns.

    Args:
        graph: The cost graph.
        ratio: Bytes that a region makes over those of them that are read behind it, at least.
        apart: Nodes that are in no region.
        place: Which of equal places: behind a product, say, or behind its activation.
    """
    readers = collections.Counter(v for node in graph.nodes for v in node.reads)
    found: list[int] = []
    start = 0
    while start < len(graph.nodes):
        cut, start = _next_cut(graph, ratio, start, apart, place, readers)
        found += [] if cut is None else [cut]
    return found


def _next_cut(
    graph: CostGraph,
    ratio: int,
    start: int,
    apart: Collection[int],
    place: Place,
    readers: Mapping[int, int],
) -> tuple[int | None, int]:
    """The next cut behind a place, if there is one, and where to look for the one behind it."""
    last = graph.last_readers
    made = saved = 0
    ends: collections.Counter[int] = collections.Counter()
    best: tuple[int, int, int] | None = None
    limit = math.inf
    for k in range(start, len(graph.nodes)):
        node = graph.nodes[k]
        if k in apart:
            return (None, k + 1) if best is None else (best[-1], best[-1])
        made += sum(graph.sizes[v] for v in node.makes if not graph.is_fused(v))
        for v in node.makes:
            if last.get(v, -1) > k:
                saved += graph.sizes[v]
                ends[last[v]] += graph.sizes[v]
        saved -= ends[k]
        if best is None and 0 < ratio * saved <= made:
            limit = SETTINGS.cut_window * made
        if made > limit:
            break
        if limit < math.inf and saved and k + 1 < len(graph.nodes):
            is_read_once = max((readers[v] for v in node.makes), default=0) < 2
            order = {"shared": int(is_read_once), "first": 0, "last": -k}[place]
            rank = saved, order, k + 1
            best = rank if best is None else min(best, rank)
    return (None, len(graph.nodes)) if best is None else (best[-1], best[-1])


def repeated_cuts(program: Program, graph: CostGraph) -> dict[str, list[int]]:
    """Return places behind equations of one source line each, by the label of their results.

    Layers that are calls of one function end at the same line. Several equations read what a layer
    with a residual connection returns, and it is most of the bytes that cross to those behind. Of
    all such lines that several equations are of, these are the few where the fewest bytes cross.

    Args:
        program: The program.
        graph: Its cost graph.
    """
    last = graph.last_readers
    readers = collections.Counter(v for node in graph.nodes for v in node.reads)
    ends: collections.Counter[int] = collections.Counter()
    places: dict[str, list[int]] = {}
    most: dict[str, int] = {}
    shared: set[str] = set()
    crossing = 0
    for k, node in enumerate(graph.nodes):
        for v in node.makes:
            if last.get(v, -1) > k:
                crossing += graph.sizes[v]
                ends[last[v]] += graph.sizes[v]
        crossing -= ends[k]
        of_results = sum(graph.sizes[v] for v in node.makes)
        if node.active and node.position >= 0 and 2 * of_results >= crossing > 0:
            name = label(program.eqns[program.steps[node.position]])
            places.setdefault(name, []).append(k + 1)
            most[name] = max(crossing, most.get(name, 0))
            if any(readers[v] > 1 for v in node.makes):
                shared.add(name)
    repeated = [name for name, found in places.items() if len(found) > 1 and name in shared]
    least = min((most[name] for name in repeated), default=0)
    found = [name for name in repeated if most[name] <= SETTINGS.cut_window * least]
    few = sorted(found, key=lambda name: most[name])[: SETTINGS.repeated_lines]
    return {name: places[name] for name in few}
