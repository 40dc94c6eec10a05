"""Blocks of a program: the layers that a person would put under `jax.checkpoint` one by one.

They are found as runs of equations that repeat themselves: by matrix products and convolutions of
equal shapes, or, where these cover less than half of the FLOPs, by operators of any shape, at last
by those without a product (stencils, Fourier transforms). A run is cut where the fewest bytes cross
from one repetition to the next. Its first block starts as far in front of its first product as the
others do, and its last one ends as far behind its last product: what a model does before its layers
and after them is no part of a layer.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jrc._jaxpr import Program, facts_of, primitive_name
from jrc.remat._planner.cost_graph import CostGraph, CostNode
from jrc.remat._planner.settings import SETTINGS

Run = tuple[int, int, int]
"""A periodic part of a sequence: start, period and length."""


def find_blocks(program: Program, graph: CostGraph) -> list[list[range]]:
    """Return the blocks of each stack of layers in order, as ranges of the nodes of the graph."""
    equations = {
        k: _equation(program, node)
        for k, node in enumerate(graph.nodes)
        if node.flops and node.position >= 0
    }
    products = _product_positions(program, graph)
    best: tuple[int, list[list[int]]] = (0, [])
    every = list(equations)
    for places, has_shapes, needed in (
        (products, True, products),
        (every, False, products),
        (every, False, every),
    ):
        if best[0] >= SETTINGS.repeated_flops * graph.flops:
            break
        kinds = [_kind(equations[k], has_shapes) for k in places]
        stacks = _stacks(graph, places, kinds, set(needed))
        covered = sum(graph.nodes[k].flops for k in places if _is_in(stacks, k))
        if covered > best[0]:
            best = covered, stacks
    names = {k: primitive_name(eqn) for k, eqn in equations.items()}
    return _with_neighbours(list(_without_overlaps(best[1])), names, len(graph.nodes))


def _is_in(stacks: Sequence[Sequence[int]], k: int) -> bool:
    return any(borders[0] <= k < borders[-1] for borders in stacks)


def _without_overlaps(stacks: Sequence[Sequence[int]]) -> Iterator[list[range]]:
    end = 0
    for borders in sorted(stacks):
        inside = sorted({max(k, end) for k in borders})
        end = inside[-1]
        if blocks := [range(*pair) for pair in itertools.pairwise(inside)]:
            yield blocks


def _with_neighbours(
    stacks: Sequence[list[range]], names: Mapping[int, str], count: int
) -> list[list[range]]:
    """The stacks with what stands beside them and is a block of the same operators, of any shape.

    Args:
        stacks: The blocks of each stack.
        names: The operator of each node that computes.
        count: The number of nodes.
    """
    found: list[list[range]] = []
    for n, stack in enumerate(stacks):
        blocks = list(stack)
        first = found[-1][-1].stop if found else 0
        last = stacks[n + 1][0].start if n + 1 < len(stacks) else count
        while block := _same_operators(blocks[0], range(first, blocks[0].start), names, -1):
            blocks.insert(0, block)
        while block := _same_operators(blocks[-1], range(blocks[-1].stop, last), names, 1):
            blocks.append(block)
        found.append(blocks)
    return found


def _same_operators(block: range, free: range, names: Mapping[int, str], side: int) -> range | None:
    """A block of the same operators at the end (`side` -1) or at the start of what is free."""
    own = [k for k in block if k in names]
    beside = [k for k in free if k in names]
    beside = beside[-len(own) :] if side < 0 else beside[: len(own)]
    if not own or [names[k] for k in own] != [names[k] for k in beside]:
        return None
    start = max(free.start, beside[0] - (own[0] - block.start)) if side < 0 else free.start
    end = min(free.stop, beside[-1] + block.stop - own[-1]) if side > 0 else free.stop
    return range(start, end)


def _stacks(
    graph: CostGraph, places: Sequence[int], kinds: Sequence[Any], needed: set[int]
) -> list[list[int]]:
    """The borders of each stack, that in front of its first block and behind its last included."""
    crossing = crossing_bytes(graph)
    cuts: dict[Run, _Cut] = {}

    def used(run: Run) -> tuple[int, int]:
        start, period, length = run
        covered = sum(graph.nodes[k].flops for k in places[start : start + length])
        is_stack = not needed.isdisjoint(places[start : start + period])
        if not is_stack or covered < SETTINGS.least_stack * graph.flops:
            return start, start + length
        cuts[run] = _cut_into_blocks(graph, places, run, crossing)
        return cuts[run].ends[0], cuts[run].ends[-1]

    return [list(cuts[run].borders) for run in repetitions(kinds, used) if run in cuts]


def _all_of(run: Run) -> tuple[int, int]:
    return run[0], run[0] + run[2]


def repetitions(
    kinds: Sequence[Any], used: Callable[[Run], tuple[int, int]] = _all_of
) -> Iterator[Run]:
    """Yield the periodic runs of a sequence: the one that covers most, then those beside it.

    Args:
        kinds: The sequence.
        used: Of a run, the part that later runs leave alone; all of it, if not given.

    >>> sorted(repetitions("xababazcdcd"))
    [(1, 2, 5), (7, 2, 4)]
    """
    parts = [(0, len(kinds))]
    while parts:
        begin, end = parts.pop()
        start, period, length = longest_repetition(kinds[begin:end])
        if period:
            run = begin + start, period, length
            first, last = used(run)
            yield run
            parts += [(begin, first), (last, end)]


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


@dataclasses.dataclass(frozen=True)
class _Cut:
    """A run that is cut into blocks.

    Attributes:
        ends: The borders as indices into the places of the run.
        borders: The same as indices into the nodes of the graph.
    """

    ends: tuple[int, ...]
    borders: tuple[int, ...]


def _cut_into_blocks(
    graph: CostGraph, places: Sequence[int], run: Run, crossing: Sequence[int]
) -> _Cut:
    """The blocks of a run: of every way to cut it alike, that across which fewest bytes go.

    Several repetitions are one block where much more crosses most borders inside of it than its
    ends: the two layers that one skip goes around.
    """
    limit = SETTINGS.much_less_crossing
    start, period, length = run
    cut = _cheapest_cut(graph, places, run, crossing)
    for multiple in range(2, min(SETTINGS.most_repetitions, length // (2 * period)) + 1):
        wider = _cheapest_cut(graph, places, (start, multiple * period, length), crossing)
        first, last = wider.borders[0], wider.borders[-1]
        inside = [k for k in cut.borders if first < k < last and k not in wider.borders]
        saved = [k for k in inside if _around(wider.borders, k, crossing) <= limit * crossing[k]]
        if 2 * len(saved) > len(inside):
            return wider
    return cut


def _around(borders: Sequence[int], k: int, crossing: Sequence[int]) -> int:
    """The bytes that cross the larger of the two borders around a place."""
    i = bisect.bisect(borders, k)
    return max(crossing[borders[i - 1]], crossing[borders[i]])


def _cheapest_cut(
    graph: CostGraph, places: Sequence[int], run: Run, crossing: Sequence[int]
) -> _Cut:
    start, period, length = run

    def cut(offset: int, which: int) -> _Cut:
        ends = range(start + offset, start + length + 1, period)
        return _Cut(tuple(ends), tuple(_borders(graph, places, run, ends, which, crossing)))

    def cost(found: _Cut) -> tuple[float, int, Sequence[int]]:
        # A value that several borders share is saved once.
        size = sum(graph.sizes[v] for v in crossing_values(graph, found.borders))
        blocks = len(found.borders) - 1
        # Of equal cuts the last one: a person's block ends with what the layer returns.
        return size / blocks, -blocks, [-k for k in found.borders]

    return min((cut(offset, which) for offset in range(period) for which in (0, -1)), key=cost)


def _borders(
    graph: CostGraph,
    places: Sequence[int],
    run: Run,
    ends: Sequence[int],
    which: int,
    crossing: Sequence[int],
) -> list[int]:
    """The borders of a run: between two repetitions the cheapest, at its ends as those lie."""
    start, _, length = run
    between = [end for end in ends if start < end < start + length]
    inner = {end: _cheapest_between(graph, places, end, crossing)[which] for end in between}
    found = dict(inner)
    active = list(itertools.accumulate((node.active for node in graph.nodes), initial=0))
    if ends[0] == start:
        ahead = [active[places[end]] - active[k] for end, k in inner.items()]
        limit = places[start - 1] + 1 if start else 0
        found[start] = _place_ahead(active, places[start], _median(ahead), limit)
    if ends[-1] == start + length:
        behind = [active[k] - active[places[end - 1] + 1] for end, k in inner.items()]
        limit = places[start + length] if start + length < len(places) else len(graph.nodes)
        last = places[start + length - 1] + 1
        found[start + length] = _place_behind(active, last, _median(behind), limit)
    return [found[end] for end in ends]


def _place_ahead(active: Sequence[int], end: int, distance: int, limit: int) -> int:
    """The last place with so many active nodes between itself and another one behind it."""
    k = end
    while k > limit and active[end] - active[k] < distance:
        k -= 1
    return k


def _place_behind(active: Sequence[int], start: int, distance: int, limit: int) -> int:
    """The first place with so many active nodes between another one and itself."""
    k = start
    while k < limit and active[k] - active[start] < distance:
        k += 1
    return k


def _median(numbers: Sequence[int]) -> int:
    """The lower median; 0 of nothing."""
    return sorted(numbers)[(len(numbers) - 1) // 2] if numbers else 0


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


def _cheapest_between(
    graph: CostGraph, places: Sequence[int], end: int, crossing: Sequence[int]
) -> tuple[int, int]:
    """The borders of least crossing bytes behind one computing node and up to the next.

    The first of equal ones, and the last that stands behind an operator which computes: the views
    behind it belong to the next layer.
    """
    first = places[end - 1] + 1 if end > 0 else 0
    last = places[end] if end < len(places) else len(crossing) - 1
    least = min(crossing[first : last + 1])
    equal = [k for k in range(first, last + 1) if crossing[k] == least]
    computed = [k for k in equal if k and graph.nodes[k - 1].flops]
    return equal[0], (computed or equal)[-1]


def _kind(eqn: Any, has_shapes: bool) -> Any:
    shapes = tuple(str(v.aval) for v in (*eqn.invars, *eqn.outvars)) if has_shapes else ()
    return primitive_name(eqn), shapes
