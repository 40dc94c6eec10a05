"""Regions of a program that run one after the other."""

from collections.abc import Sequence
from typing import Any

from jrc._jaxpr import INPUT, Program


def can_run_in_turn(
    program: Program, read: Sequence[Sequence[Any]], equations: Sequence[Sequence[int]]
) -> bool:
    """Return whether no two regions wait for each other, directly or through what stands between.

    Args:
        program: The program.
        read: Of each region the values that it reads.
        equations: Its equations.
    """
    owner = {p: n for n, each in enumerate(equations) for p in each}

    def needed(values: Sequence[Any]) -> set[int]:
        """The regions that one needs, through equations outside."""
        wanted, seen, found = list(values), set[int](), set[int]()
        while wanted:
            p = program.producer[wanted.pop()]
            if p == INPUT or p in seen:
                continue
            seen.add(p)
            if p in owner:
                found.add(owner[p])
            else:
                wanted += program.reads(p)
        return found

    needs = [needed(values) for values in read]  # one that needs itself is never ready
    done: set[int] = set()
    while ready := [n for n, need in enumerate(needs) if n not in done and need <= done]:
        done.update(ready)
    return len(done) == len(needs)
