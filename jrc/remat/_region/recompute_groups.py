"""Which equations share a region, so that single operators are recomputed and the rest is saved.

JAX saves a value for the operator whose derivative reads it. A value is recomputed instead only if
that operator stands in one region with the operator that makes the value.
"""

import graphlib
import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

from jrc._jaxpr import Program, Reads, View, facts_of, has_effects
from jrc.remat._region.effects import must_run_once

# Recomputed together with their operand: else the view would be saved in its place.
_VIEWS = (View.NAME, View.RESHAPE, View.COPY, View.REORDER)


def with_views(program: Program, positions: Sequence[int], rerun: Collection[int]) -> set[int]:
    """Return the recomputed equations and the views of what they make."""
    found = set(rerun)
    for p in positions:
        if is_view(program.eqns[p]):
            found |= {p} if any(program.producer[x] in found for x in program.reads(p)) else set()
    return found


def groups(
    program: Program, positions: Sequence[int], rerun: Collection[int]
) -> list[tuple[list[int], bool]]:
    """Return the equations in an order to run them, in ranges, and whether each is a region.

    Args:
        program: The program.
        positions: The equations, in program order.
        rerun: Those that are recomputed, views included.
    """
    inside = set(positions)
    parent = {p: p for p in positions}

    def find(p: int) -> int:
        while parent[p] != p:
            parent[p] = parent[parent[p]]
            p = parent[p]
        return p

    def join(p: int, q: int) -> None:
        parent[max(find(p), find(q))] = min(find(p), find(q))

    for p in sorted(rerun):
        for var in program.eqns[p].outvars:
            for reader in inside.intersection(program.consumers.get(var, ())):
                if must_run_once(program.eqns[reader]):
                    continue
                if reader in rerun or needs_arguments(program.eqns[reader]):
                    join(p, reader)
    order = _ordered(program, positions, find, join)
    members: dict[int, list[int]] = {}
    for p in positions:
        members.setdefault(find(p), []).append(p)
    rerun = set(rerun)
    return _merged([(members[root], not rerun.isdisjoint(members[root])) for root in order])


def is_view(eqn: Any) -> bool:
    """Return whether an equation names its operand, or changes its shape, order or type."""
    return facts_of(eqn).view in _VIEWS


def needs_arguments(eqn: Any) -> bool:
    """Return whether the derivative of an equation reads its operands."""
    return bool(facts_of(eqn).derivative_reads & Reads.OPERANDS)


def _ordered(
    program: Program,
    positions: Sequence[int],
    find: Callable[[int], int],
    join: Callable[[int, int], None],
) -> list[int]:
    """The groups, each after all that it reads; groups on a cycle become one.

    Equations with effects stay in program order.
    """
    inside = set(positions)
    effects = pairwise(p for p in positions if has_effects(program.eqns[p]))
    before = {p: {earlier} for earlier, p in effects}
    while True:
        needs: dict[int, set[int]] = {find(p): set() for p in positions}
        for p in positions:
            made = {program.producer[var] for var in program.reads(p)} | before.get(p, set())
            needs[find(p)] |= {find(q) for q in made & inside} - {find(p)}
        try:
            return _stable(needs)
        except graphlib.CycleError as error:
            cycle = error.args[1]
            for p in cycle:
                join(cycle[0], p)


def _stable(needs: Mapping[int, set[int]]) -> list[int]:
    """The groups in program order, as far as their needs allow."""
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
    """Adjacent ranges that are no region, as one range."""
    merged: list[tuple[list[int], bool]] = []
    for members, is_region in parts:
        if merged and not is_region and not merged[-1][1]:
            merged[-1][0].extend(members)
        else:
            merged.append((list(members), is_region))
    return merged
