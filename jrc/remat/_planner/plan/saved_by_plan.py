"""What a decision saves, for a table: equal values together, by mark or by operator and line."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jrc._jaxpr import INPUT, Program, label, loop_parts, nbytes, place
from jrc._text import memory_text
from jrc.remat._planner.plan.decision import Loop, Stages, bodies, variable_at, walk

BASELINE = "baseline"
"""The name of the candidate that is the function as it is: nothing is recomputed or in chunks."""

NOTHING_RECOMPUTED = "nothing recomputed"
"""The name of the candidate that recomputes nothing of a program in chunks."""

ON_HOST = ", on the host"
"""Follows the name of a value that is saved in the host's memory."""

# Values that a change between two candidates names, for each direction.
_NAMED = 2


@dataclasses.dataclass(frozen=True)
class Kept:
    """Values that a plan saves, equal ones together.

    Attributes:
        name: Their mark, or operator, shape and source line.
        times: How many there are, steps of a loop included.
        bytes: Bytes of all of them; on all devices together, where XLA shards them by itself.
    """

    name: str
    times: int
    bytes: int


def saved_by(program: Program, decision: Stages) -> tuple[Kept, ...]:
    """Return what a decision saves, the largest first."""
    found: dict[str, tuple[int, int]] = {}
    for name, count, size in _each(program, decision):
        n, total = found.get(name, (0, 0))
        found[name] = (n + count, total + size)
    kept = [Kept(name, n, size) for name, (n, size) in found.items()]
    return tuple(sorted(kept, key=lambda each: (-each.bytes, each.name)))


def change_text(before: Sequence[Kept] | None, after: Sequence[Kept]) -> str:
    """Return what one candidate saves more and less than the leaner one before it.

    Args:
        before: What the leaner candidate saves; `None` for the first of a row.
        after: What this one saves.
    """
    if before is None:
        return f"saves {_sum_text(after)}" if after else "saves nothing"
    old, new = ({each.name: each for each in kept} for kept in (before, after))
    more = [_less(each, old.get(each.name)) for each in after]
    less = [_less(each, new.get(each.name)) for each in before]
    texts = [
        f"{sign} {_sum_text(changed)}"
        for sign, kept in (("+", more), ("-", less))
        if (changed := [each for each in kept if each.bytes > 0])
    ]
    return ", ".join(texts) or "the same values, other regions"


def _less(each: Kept, other: Kept | None) -> Kept:
    if other is None:
        return each
    return Kept(each.name, each.times - other.times, each.bytes - other.bytes)


def _sum_text(kept: Sequence[Kept]) -> str:
    ordered = sorted(kept, key=lambda each: -each.bytes)
    names = [
        each.name if each.times <= 1 else f"{each.times:,} x {each.name}"
        for each in ordered[:_NAMED]
    ]
    if len(ordered) > _NAMED:
        names.append(f"{len(ordered) - _NAMED} more")
    return f"{', '.join(names)} ({memory_text(sum(each.bytes for each in kept))})"


def _each(program: Program, decision: Stages) -> Iterable[tuple[str, int, int]]:
    """Every saved value: its name, how many there are, and their bytes."""
    for inner, stages, times in walk(program, decision):
        given = [each for each in stages.offloaded if each[0] == INPUT]
        for each in (*given, *(value for region in stages.regions for value in region.saved)):
            var = inner.unmarked(variable_at(inner, each))
            name = inner.names.get(var) or _label(inner, var)
            name += ON_HOST if each in stages.offloaded else ""
            yield name, times, times * nbytes(var.aval)
        for loop in (stage for stage in stages.stages if isinstance(stage, Loop)):
            yield from _between_segments(inner, loop, times)


def _between_segments(program: Program, loop: Loop, times: int) -> Iterable[tuple[str, int, int]]:
    """The carries that are saved between the segments of a loop."""
    eqn = program.eqns[program.steps[loop.equation]]
    start, count = loop_parts(eqn)
    for body, part in zip(bodies(program, loop), loop.parts, strict=True):
        carries = times * part.segments
        for var in body.program.jaxpr.invars[start : start + count] if carries else ():
            name = f"carry between segments of the loop at {place(eqn)}"
            yield name, carries, carries * nbytes(var.aval)


def _label(program: Program, var: Any) -> str:
    p = program.producer[var]
    if p == INPUT:
        return f"carry:{','.join(map(str, var.aval.shape))}"
    return label(program.eqns[p])
