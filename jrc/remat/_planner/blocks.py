"""Blocks of a program: the layers that a person would put under `jax.checkpoint` one by one.

They are found as runs of equations that repeat themselves: by matrix products and convolutions of
equal shapes, or, where these cover less than half of the FLOPs, by operators of any shape, at last
by those without a product (stencils, Fourier transforms). A run is cut where the fewest bytes cross
from one repetition to the next.
"""

import bisect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jrc._jaxpr import Program, facts_of, primitive_name
from jrc.remat._planner.cost_graph import CostGraph, CostNode
from jrc.remat._planner.settings import SETTINGS

Run = tuple[int, int, int]
"""A periodic part of a sequence: start, period and length."""


def block_borders(program: Program, graph: CostGraph) -> list[int]:
    """Return the places between blocks, as indices into the nodes of the graph; none if no repeats.

    A border at index k lies in front of node k.
    """
    equations = {
        k: _equation(program, node)
        for k, node in enumerate(graph.nodes)
        if node.flops and node.position >= 0
    }
    products = _product_positions(program, graph)
    best: tuple[int, list[int], list[Run]] = (0, [], [])
    every = list(equations)
    for places, has_shapes, needed in (
        (products, True, products),
        (every, False, products),
        (every, False, every),
    ):
        if best[0] >= SETTINGS.repeated_flops * graph.flops:
            break
        kinds = [_kind(equations[k], has_shapes) for k in places]
        runs = [
            (start, period, length)
            for start, period, length in repetitions(kinds)
            if any(k in needed for k in places[start : start + period])
        ]
        covered = sum(graph.nodes[k].flops for s, _, n in runs for k in places[s : s + n])
        if covered > best[0]:
            best = covered, places, runs
    _, places, runs = best
    found = {k for run in runs for k in _borders_of(graph, places, run)}
    return sorted(k for k in found if 0 < k < len(graph.nodes))


def end_of_last_block(program: Program, graph: CostGraph, borders: Sequence[int]) -> int:
    """Return the place as far behind the last product as the other borders are behind theirs.

    Where blocks have no products, it is any operator that computes.
    """
    places = _product_positions(program, graph)
    if not places or places[0] >= borders[0]:
        places = [k for k, node in enumerate(graph.nodes) if node.flops and node.position >= 0]
    behind = sorted(k - max(p for p in places if p < k) for k in borders if places[0] < k)
    distance = behind[len(behind) // 2] if behind else 1
    return min(places[-1] + distance, len(graph.nodes) - 1)


def repetitions(kinds: Sequence[Any]) -> Iterator[Run]:
    """Yield the periodic runs of a sequence: the one that covers most, then those beside it.

    >>> sorted(repetitions("xababazcdcd"))
    [(1, 2, 5), (7, 2, 4)]
    """
    parts = [(0, len(kinds))]
    while parts:
        begin, end = parts.pop()
        start, period, length = longest_repetition(kinds[begin:end])
        if period:
            yield begin + start, period, length
            parts += [(begin, begin + start), (begin + start + length, end)]


def longest_repetition(kinds: Sequence[Any]) -> Run:
    """Return start, period and length of the periodic run that covers most of a sequence.

    Of equal ones it is that of the shortest period; the period is 0 if nothing repeats.

    >>> longest_repetition("xababaz")
    (1, 2, 5)
    """
    number: dict[Any, int] = {}
    numbers = np.array([number.setdefault(kind, len(number)) for kind in kinds], int)
    best = (0, 0, 0)
    for period in range(1, len(kinds) // 2 + 1):
        # Runs of places that are equal to the place one period behind.
        equal = np.concatenate([[0], numbers[:-period] == numbers[period:], [0]]).astype(int)
        starts, ends = np.flatnonzero(np.diff(equal) > 0), np.flatnonzero(np.diff(equal) < 0)
        if len(starts) and (run := int((ends - starts).max())) >= period:
            start = int(starts[(ends - starts).argmax()])
            best = max(best, (run + period, -period, -start))
    length, period, start = best
    return -start, -period, length


def crossing_values(graph: CostGraph, borders: Sequence[int]) -> frozenset[int]:
    """Return the values that are made in front of one of these borders and read behind it.

    Args:
        graph: The cost graph.
        borders: Indices into its nodes, in rising order.
    """
    last = _last_readers(graph)
    found: set[int] = set()
    for k, node in enumerate(graph.nodes):
        i = bisect.bisect(borders, k)
        if i < len(borders):
            found.update(v for v in node.makes if borders[i] <= last.get(v, -1))
    return frozenset(found)


def crossing_bytes(graph: CostGraph) -> list[int]:
    """Return, for each border, the bytes of the values that cross it."""
    last = _last_readers(graph)
    change = [0] * (len(graph.nodes) + 2)
    for k, node in enumerate(graph.nodes):
        for v in node.makes:
            if v in last:
                change[k + 1] += graph.sizes[v]
                change[last[v] + 1] -= graph.sizes[v]
    total, found = 0, []
    for step in change[:-1]:
        total += step
        found.append(total)
    return found


def _borders_of(graph: CostGraph, places: Sequence[int], run: Run) -> list[int]:
    """The borders of a run: of every way to cut it alike, that across which fewest bytes go.

    Several repetitions are one block where much more crosses most borders inside of it than its
    ends: the two layers that one skip goes around.
    """
    crossing, limit = crossing_bytes(graph), SETTINGS.much_less_crossing
    start, period, length = run
    found = _cheapest_borders(graph, places, run, crossing)
    for multiple in range(2, min(SETTINGS.most_repetitions, length // (2 * period)) + 1):
        wider = _cheapest_borders(graph, places, (start, multiple * period, length), crossing)
        inside = [k for k in found if wider[0] < k < wider[-1] and k not in wider]
        saved = [k for k in inside if _ends(wider, k, crossing) <= limit * crossing[k]]
        if 2 * len(saved) > len(inside):
            return wider
    return found


def _ends(borders: Sequence[int], k: int, crossing: Sequence[int]) -> int:
    """The bytes that cross the larger of the two borders around a place."""
    i = bisect.bisect(borders, k)
    return max(crossing[borders[i - 1]], crossing[borders[i]])


def _cheapest_borders(
    graph: CostGraph, places: Sequence[int], run: Run, crossing: Sequence[int]
) -> list[int]:
    start, period, length = run

    def borders(offset: int, which: int) -> list[int]:
        ends = range(start + offset, start + length + 1, period)
        return [_cheapest_between(places, end, crossing)[which] for end in ends]

    def cost(found: Sequence[int]) -> tuple[float, int, Sequence[int]]:
        # A value that several borders share is saved once.
        size = sum(graph.sizes[v] for v in crossing_values(graph, found))
        # Of equal cuts the last one: a person's block ends with what the layer returns.
        return size / len(found), -len(found), [-k for k in found]

    return min((borders(offset, which) for offset in range(period) for which in (0, -1)), key=cost)


def _product_positions(program: Program, graph: CostGraph) -> list[int]:
    """The nodes that are matrix products or convolutions, or constructs with programs inside."""
    return [
        k
        for k, node in enumerate(graph.nodes)
        if node.position >= 0
        and node.flops
        and (node.inner_bytes is not None or facts_of(_equation(program, node)).is_contraction)
    ]


def _equation(program: Program, node: CostNode) -> Any:
    return program.eqns[program.steps[node.position]]


def _last_readers(graph: CostGraph) -> dict[int, int]:
    return {v: k for k, node in enumerate(graph.nodes) for v in node.reads}


def _cheapest_between(places: Sequence[int], end: int, crossing: Sequence[int]) -> list[int]:
    """The borders of least crossing bytes behind one computing node and up to the next."""
    first = places[end - 1] + 1 if end > 0 else 0
    last = places[end] if end < len(places) else len(crossing) - 1
    least = min(crossing[first : last + 1])
    return [k for k in range(first, last + 1) if crossing[k] == least]


def _kind(eqn: Any, has_shapes: bool) -> Any:
    shapes = tuple(str(v.aval) for v in (*eqn.invars, *eqn.outvars)) if has_shapes else ()
    return primitive_name(eqn), shapes
