"""Which equations must share a region, so that single operators are re-run and all else is kept.

A value is held by whoever reads it for a derivative. To have it made again, its reader must stand
in one region with its maker.
"""

import graphlib
import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jrc._jaxpr import Program, Reads, View, facts_of

# What is recomputed together with its operand: else the view would be saved in its place.
_VIEWS = (View.NAME, View.RESHAPE, View.COPY, View.REORDER)


def with_views(program: Program, positions: Sequence[int], rerun: Collection[int]) -> set[int]:
    """The re-run equations, and those that show what they make in another shape or type."""
    found = set(rerun)
    for p in positions:
        eqn = program.eqns[p]
        if is_view(eqn):
            found |= {p} if any(program.producer[x] in found for x in program.reads(p)) else set()
    return found


def groups(
    program: Program, positions: Sequence[int], rerun: Collection[int]
) -> list[tuple[list[int], bool]]:
    """The equations in an order to run them, cut into stretches; whether each is a region.

    Args:
        program: The program.
        positions: Equations to be dealt out.
        rerun: Those that are re-run, views included.
    """
    inside = set(positions)
    home = {p: p for p in positions}

    def find(p: int) -> int:
        while home[p] != p:
            home[p] = home[home[p]]
            p = home[p]
        return p

    def join(p: int, q: int) -> None:
        home[max(find(p), find(q))] = min(find(p), find(q))

    for p in sorted(rerun):
        for var in program.eqns[p].outvars:
            for reader in inside.intersection(program.consumers.get(var, ())):
                if reader in rerun or needs_arguments(program.eqns[reader]):
                    join(p, reader)
    order = _ordered(program, positions, find, join)
    members: dict[int, list[int]] = {}
    for p in positions:
        members.setdefault(find(p), []).append(p)
    again = set(rerun)
    return _merged([(members[root], not again.isdisjoint(members[root])) for root in order])


def is_view(eqn: Any) -> bool:
    """Whether an equation shows its argument under a name, or in another shape or type."""
    return facts_of(eqn).view in _VIEWS


def needs_arguments(eqn: Any) -> bool:
    """Whether the derivative of an equation reads what it is given."""
    return bool(facts_of(eqn).derivative_reads & Reads.OPERANDS)


def _ordered(
    program: Program,
    positions: Sequence[int],
    find: Callable[[int], int],
    join: Callable[[int, int], None],
) -> list[int]:
    """The groups, each after all that it reads; groups that need each other become one."""
    inside = set(positions)
    while True:
        needs: dict[int, set[int]] = {find(p): set() for p in positions}
        for p in positions:
            made = {program.producer[var] for var in program.reads(p)}
            needs[find(p)] |= {find(q) for q in made & inside} - {find(p)}
        try:
            return _stable(needs)
        except graphlib.CycleError as error:
            cycle = error.args[1]
            for p in cycle:
                join(cycle[0], p)


def _stable(needs: Mapping[int, set[int]]) -> list[int]:
    """In program order, as far as what they need allows."""
    sorter = graphlib.TopologicalSorter(needs)
    sorter.prepare()
    ready, order = list(sorter.get_ready()), []
    heapq.heapify(ready)
    while ready:
        root = heapq.heappop(ready)
        order.append(root)
        sorter.done(root)
        for other in sorter.get_ready():
            heapq.heappush(ready, other)
    return order


def _merged(parts: Sequence[tuple[list[int], bool]]) -> list[tuple[list[int], bool]]:
    """Neighbours that are no region, as one stretch."""
    merged: list[tuple[list[int], bool]] = []
    for members, is_region in parts:
        if merged and not is_region and not merged[-1][1]:
            merged[-1][0].extend(members)
        else:
            merged.append((list(members), is_region))
    return merged
