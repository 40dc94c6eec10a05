"""Blocks of a program: the layers that a person would put under `jax.checkpoint` one by one.

They are found as runs of equations that repeat themselves: by matrix products and convolutions of
equal shapes, or, where these cover less than half of the FLOPs, by operators of any shape, at last
by those without a product (stencils, Fourier transforms). A run is cut where the fewest bytes cross
from one repetition to the next. Its first block starts as far in front of its first product as the
others do, and its last one ends as far behind its last product: what a model does before its layers
and after them is no part of a layer.
"""

import bisect
import collections
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jrc._jaxpr import Program, facts_of, primitive_name
from jrc.remat._planner.costs.cost_graph import CostGraph, CostNode
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
    names = {k: primitive_name(eqn) for k, eqn in equations.items()}
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
        stacks = _stacks(graph, places, kinds, set(needed), names)
        covered = sum(graph.nodes[k].flops for k in places if _is_in(stacks, k))
        if covered > best[0]:
            best = covered, stacks
    return list(_without_overlaps(best[1]))


def _is_in(stacks: Sequence[Sequence[int]], k: int) -> bool:
    return any(borders[0] <= k < borders[-1] for borders in stacks)


def _without_overlaps(stacks: Sequence[Sequence[int]]) -> Iterator[list[range]]:
    end = 0
    for borders in sorted(stacks, key=lambda each: each[0]):
        inside = sorted({max(k, end) for k in borders})
        end = inside[-1]
        if blocks := [range(*pair) for pair in itertools.pairwise(inside)]:
            yield blocks


def _with_neighbours(borders: Sequence[int], free: range, names: Mapping[int, str]) -> list[int]:
    """The borders of a stack with what stands beside it and is a block of the same operators.

    Args:
        borders: The borders of the stack.
        free: Where it may grow, itself included.
        names: The operator of each node that computes.
    """
    found = list(borders)
    while block := _same_operators(
        range(*found[:2]), range(free.start, found[0]), names, at_end=True
    ):
        found.insert(0, block.start)
    while block := _same_operators(
        range(*found[-2:]), range(found[-1], free.stop), names, at_end=False
    ):
        found.append(block.stop)
    return found


def _same_operators(
    block: range, free: range, names: Mapping[int, str], at_end: bool
) -> range | None:
    """A block of the same operators, of any shape, at the end or at the start of what is free.

    If all that is free in front of a block are more than half of its operators, it is one too: the
    first of a net whose blocks begin with pooling, or end with a skip.
    """
    own = [names[k] for k in block if k in names]
    computing = [k for k in free if k in names]
    at = computing[-len(own) :] if at_end else computing[: len(own)]
    beside = [names[k] for k in at]
    is_first = at_end and len(own) < 2 * len(beside) and len(beside) < len(own)
    if not own or beside not in (
        [own, own[-len(beside) :], own[: len(beside)]] if is_first else [own]
    ):
        return None
    if at_end:
        ahead = min(k for k in block if k in names) - block.start
        return range(max(free.start, at[0] - ahead), free.stop)
    behind = block.stop - max(k for k in block if k in names)
    return range(free.start, min(free.stop, at[-1] + behind))


def _stacks(
    graph: CostGraph,
    places: Sequence[int],
    kinds: Sequence[Any],
    needed: set[int],
    names: Mapping[int, str],
) -> list[list[int]]:
    """The borders of each stack, that in front of its first block and behind its last included."""
    crossing = crossing_bytes(graph)
    found: list[list[int]] = []

    def used(run: Run, begin: int, end: int) -> tuple[int, int]:
        start, period, length = run
        covered = sum(graph.nodes[k].flops for k in places[start : start + length])
        is_stack = not needed.isdisjoint(places[start : start + period])
        if not is_stack or covered < SETTINGS.least_stack * graph.flops:
            return start, start + length
        borders = _cut_into_blocks(graph, places, run, crossing)
        first = places[begin - 1] + 1 if begin else 0
        last = places[end] if end < len(places) else len(graph.nodes)
        borders = _with_neighbours(borders, range(first, last), names)
        found.append(borders)
        return bisect.bisect_left(places, borders[0]), bisect.bisect_left(places, borders[-1])

    for _ in repetitions(kinds, used):
        pass
    return found


def _all_of(run: Run, begin: int, end: int) -> tuple[int, int]:
    return run[0], run[0] + run[2]


def repetitions(
    kinds: Sequence[Any], used: Callable[[Run, int, int], tuple[int, int]] = _all_of
) -> Iterator[Run]:
    """Yield the periodic runs of a sequence: the one that covers most, then those beside it.

    Args:
        kinds: The sequence.
        used: Of a run, in a part that is left from one place to another, what later runs leave
            alone; all of it, if not given.

    >>> sorted(repetitions("xababazcdcd"))
    [(1, 2, 5), (7, 2, 4)]
    """
    parts = [(0, len(kinds))]
    while parts:
        begin, end = parts.pop()
        start, period, length = longest_repetition(kinds[begin:end])
        if period:
            run = begin + start, period, length
            first, last = used(run, begin, end)
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


def _cut_into_blocks(
    graph: CostGraph, places: Sequence[int], run: Run, crossing: Sequence[int]
) -> list[int]:
    """The borders of a run: of every way to cut it alike, that across which fewest bytes go.

    Several repetitions are one block where much more crosses most borders inside of it than its
    ends: the two layers that one skip goes around.
    """
    limit = SETTINGS.much_less_crossing
    start, period, length = run
    found = _cheapest_cut(graph, places, run, crossing)
    for multiple in range(2, min(SETTINGS.most_repetitions, length // (2 * period)) + 1):
        wider = _cheapest_cut(graph, places, (start, multiple * period, length), crossing)
        if len(wider) <= 2:  # one block is no stack
            continue
        inside = [k for k in found if wider[0] < k < wider[-1] and k not in wider]
        saved = [k for k in inside if _around(wider, k, crossing) <= limit * crossing[k]]
        if 2 * len(saved) > len(inside):
            return wider
    return found


def _around(borders: Sequence[int], k: int, crossing: Sequence[int]) -> int:
    """The bytes that cross the larger of the two borders around a place."""
    i = bisect.bisect(borders, k)
    return max(crossing[borders[i - 1]], crossing[borders[i]])


def _cheapest_cut(
    graph: CostGraph, places: Sequence[int], run: Run, crossing: Sequence[int]
) -> list[int]:
    start, period, length = run

    def borders(offset: int, which: int) -> list[int]:
        ends = range(start + offset, start + length + 1, period)
        return _borders(graph, places, run, ends, which, crossing)

    def cost(found: Sequence[int]) -> tuple[float, int, Sequence[int]]:
        # A value that several borders share is saved once.
        size = sum(graph.sizes[v] for v in crossing_values(graph, found))
        # Of equal cuts the last one: a person's block ends with what the layer returns.
        return size / (len(found) - 1), -len(found), [-k for k in found]

    return min((borders(offset, which) for offset in range(period) for which in (0, -1)), key=cost)


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
    between = list(ends[1:-1]) or [end for end in ends if start < end < start + length]
    active = list(itertools.accumulate((node.active for node in graph.nodes), initial=0))
    cheapest = {end: _cheapest_between(graph, places, end, crossing) for end in between}
    inner = _alike(cheapest, {end: active[places[end - 1] + 1] for end in between}, active, which)
    found = dict(inner)
    if ends[0] not in found:
        ahead = [active[places[end]] - active[k] for end, k in inner.items()]
        limit = places[ends[0] - 1] + 1 if ends[0] else 0
        found[ends[0]] = _place_ahead(active, places[ends[0]], _median(ahead), limit)
    if ends[-1] not in found:
        behind = [active[k] - active[places[end - 1] + 1] for end, k in inner.items()]
        limit = places[ends[-1]] if ends[-1] < len(places) else len(graph.nodes)
        last = places[ends[-1] - 1] + 1
        found[ends[-1]] = _place_behind(active, last, _median(behind), limit)
    return [found[end] for end in ends]


def _alike(
    cheapest: Mapping[int, Sequence[int]],
    products: Mapping[int, int],
    active: Sequence[int],
    which: int,
) -> dict[int, int]:
    """Of the cheapest places for each border that which lies behind its product as most others do.

    A skip that a layer's first operator reads makes places behind that operator as cheap.

    Args:
        cheapest: The cheapest places, by border.
        products: For each border, the number of active nodes up to its product.
        active: For each place, the number of active nodes in front of it.
        which: 0 for the first of equal places, -1 for the last.
    """
    distances = {
        end: {active[k] - products[end]: k for k in reversed(some)}
        for end, some in cheapest.items()
    }
    times = collections.Counter(d for some in distances.values() for d in some)
    usual = max(times, key=lambda d: (times[d], d if which else -d), default=0)
    return {end: distances[end].get(usual, some[which]) for end, some in cheapest.items()}


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
) -> list[int]:
    """The borders of least crossing bytes behind one computing node and up to the next.

    Those that stand behind an operator which computes, if there are any: the views behind it belong
    to the next layer.
    """
    first = places[end - 1] + 1 if end > 0 else 0
    last = places[end] if end < len(places) else len(crossing) - 1
    least = min(crossing[first : last + 1])
    equal = [k for k in range(first, last + 1) if crossing[k] == least]
    return [k for k in equal if k and graph.nodes[k - 1].flops] or equal


def _kind(eqn: Any, has_shapes: bool) -> Any:
    shapes = tuple(str(v.aval) for v in (*eqn.invars, *eqn.outvars)) if has_shapes else ()
    return primitive_name(eqn), shapes
