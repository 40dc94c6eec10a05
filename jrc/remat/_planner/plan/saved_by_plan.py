"""What a decision saves, for a table: equal values together, by mark or by operator and line."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jrc._jaxpr import INPUT, Program, label, loop_parts, nbytes, place, repeats
from jrc._text import memory_text
from jrc.remat._planner.execute.execute import variable_at
from jrc.remat._planner.plan.decision import Decision, Stage
from jrc.remat._planner.program.trace import inlined_program

NOTHING_RECOMPUTED = "nothing recomputed"
"""The name of the last candidate of a row."""

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


def saved_by(program: Program, decision: Decision) -> tuple[Kept, ...]:
    """Return what a decision saves, the largest first."""
    found: dict[str, tuple[int, int]] = {}
    for name, count, size in _each(program, decision, 1):
        n, total = found.get(name, (0, 0))
        found[name] = (n + count, total + size)
    kept = [Kept(name, n, size) for name, (n, size) in found.items()]
    return tuple(sorted(kept, key=lambda each: (-each.bytes, each.name)))


def change_text(before: Sequence[Kept] | None, after: Sequence[Kept] | None) -> str:
    """Return what one candidate saves more and less than the leaner one before it.

    Args:
        before: What the leaner candidate saves; `None` for the first of a row.
        after: What this one saves; `None` where nothing is recomputed.
    """
    if after is None:
        return NOTHING_RECOMPUTED
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


def _each(program: Program, decision: Decision, times: int) -> Iterable[tuple[str, int, int]]:
    """Every saved value: its name, how many there are, and their bytes."""
    given = [each for each in decision.offloaded if each[0] == INPUT]
    for stage in (Stage((), saved=tuple(given)), *decision.stages):
        for each in stage.saved:
            var = program.unmarked(variable_at(program, each))
            name = program.names.get(var) or _label(program, var)
            name += ON_HOST if each in decision.offloaded else ""
            yield name, times, times * nbytes(var.aval)
        if stage.inside is not None:
            yield from _each_inside(program, stage.positions[0], stage.inside, times)


def _label(program: Program, var: Any) -> str:
    p = program.producer[var]
    if p == INPUT:
        return f"carry:{','.join(map(str, var.aval.shape))}"
    return label(program.eqns[p])


def _each_inside(
    program: Program, position: int, inside: Decision, times: int
) -> Iterable[tuple[str, int, int]]:
    eqn = program.eqns[program.steps[position]]
    if inside.branches:
        for jaxpr, branch in zip(eqn.params["branches"], inside.branches, strict=True):
            yield from _each(inlined_program(jaxpr), branch or Decision(()), times)
        return
    body = inlined_program(eqn.params["jaxpr"])
    for steps, part in inside.parts or ((repeats(eqn), inside),):
        if part.chunks:
            start, count = loop_parts(eqn)
            carries = times * part.chunks
            for var in body.jaxpr.invars[start : start + count]:
                name = f"carry between chunks of the loop at {place(eqn)}"
                yield name, carries, carries * nbytes(var.aval)
        yield from _each(body, part, times * steps)
