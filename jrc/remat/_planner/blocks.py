"""Blocks of a program: the layers that a person would put under `jax.checkpoint` one by one.

They are found as the longest run of equations that repeats itself, cut where the fewest bytes
cross from one repetition to the next.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jrc._jaxpr import Program, primitive_name
from jrc.remat._planner.cost_graph import CostGraph


def block_borders(program: Program, graph: CostGraph) -> list[int]:
    """Return the places between blocks, as indices into the nodes of the graph; none if no repeats.

    A border at index k lies in front of node k.
    """
    heavy = [k for k, node in enumerate(graph.nodes) if node.flops and node.position >= 0]
    kinds = [_kind(program, graph.nodes[k].position) for k in heavy]
    start, period, length = longest_repetition(kinds)
    if not period:
        return []
    crossing = crossing_bytes(graph)

    def borders(offset: int) -> list[int]:
        ends = range(start + offset, start + length + 1, period)
        return [_cheapest_between(heavy, end, crossing) for end in ends]

    found = min(
        (borders(offset) for offset in range(period)),
        key=lambda places: (sum(crossing[k] for k in places) / len(places), -len(places), places),
    )
    return sorted({k for k in found if 0 < k < len(graph.nodes)})


def longest_repetition(kinds: Sequence[Any]) -> tuple[int, int, int]:
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


def crossing_values(graph: CostGraph, border: int) -> frozenset[int]:
    """Return the values that are made in front of a border and read behind it."""
    last = _last_readers(graph)
    return frozenset(
        v for node in graph.nodes[:border] for v in node.makes if last.get(v, -1) >= border
    )


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


def _last_readers(graph: CostGraph) -> dict[int, int]:
    return {v: k for k, node in enumerate(graph.nodes) for v in node.reads}


def _cheapest_between(heavy: Sequence[int], end: int, crossing: Sequence[int]) -> int:
    """The border of least crossing bytes behind one computing node and up to the next."""
    first = heavy[end - 1] + 1 if end > 0 else 0
    last = heavy[end] if end < len(heavy) else len(crossing) - 1
    return min(range(first, last + 1), key=lambda k: (crossing[k], k))


def _kind(program: Program, position: int) -> Any:
    eqn = program.eqns[program.steps[position]]
    return primitive_name(eqn), tuple(str(v.aval) for v in (*eqn.invars, *eqn.outvars))
