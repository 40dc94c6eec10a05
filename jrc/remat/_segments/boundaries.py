"""Named values found in a program: where they are made and who reads them."""

import bisect
from collections.abc import Sequence
from typing import Any

from jrc._errors import close_to, listed
from jrc._jaxpr import INPUT, Program, mark_of
from jrc.remat._segments.cut_rules import Boundary


def resolve_boundaries(
    program: Program, checkpoints: Sequence[str], rule: str, who: str, fn: str
) -> tuple[list[str], list[str]]:
    """The marks that are asked for, each once, and the names that mark nothing.

    A bare name means all of its marks. The seeds' rules drop unknown names, ours refuses them.
    """
    found: dict[str, None] = {}
    unused = []
    for name in checkpoints:
        same = program.matching_marks(name)
        if not same:
            if rule == "partition" or name.partition("#")[0] in program.hidden_marks:
                raise ValueError(_unknown(program, name, who, fn))
            unused.append(name)
        found |= dict.fromkeys(same)
    return sorted(found, key=list(program.marks).index), unused


def _unknown(program: Program, name: str, who: str, fn: str) -> str:
    bare = name.partition("#")[0]
    if bare in program.hidden_marks:
        return (
            f"{who}: mark {name!r} of `{fn}` stands inside {program.hidden_marks[bare]}, which "
            "a boundary of the outer function cannot cut. Mark the result of that construct "
            "instead, or call jrc.recompute_segments on the function inside it."
        )
    return (
        f"{who}: no mark named {name!r}{close_to(name, program.marks)}; "
        f"`{fn}` marks {listed(program.marks, 'nothing: name values with jrc.mark(x, name)')}."
    )


def counts_as_work(program: Program, p: int) -> bool:
    """Whether an equation counts: marks and mere broadcasts do not."""
    eqn = program.eqns[p]
    return mark_of(eqn) is None and eqn.primitive.name != "broadcast_in_dim"


def locate_boundary(program: Program, name: str, work: Sequence[int]) -> Boundary:
    """A boundary in counted positions; of a pytree the last value made and the first one read."""
    producer = bisect.bisect_right(work, last_producer(program, name)) - 1
    read = [
        bisect.bisect_left(work, p) for v in live_parts(program, name) for p in readers(program, v)
    ]
    after = [p for p in read if p > producer]
    return Boundary(name, producer, min(after, default=len(work)))


def last_producer(program: Program, name: str) -> int:
    """The last equation that makes a part of this boundary which the result depends on."""
    return max((program.producer[value] for value in live_parts(program, name)), default=INPUT)


def live_parts(program: Program, name: str) -> list[Any]:
    """The parts of a boundary that the result depends on."""
    return [value for value in program.marked(name) if program.consumers.get(value)]


def readers(program: Program, value: Any) -> list[int]:
    """The counted equations that read a value, through marks and broadcasts."""
    found = []
    for p in program.consumers.get(value, ()):
        if p == len(program.eqns) or counts_as_work(program, p):
            found.append(p)
        else:
            found += readers(program, program.eqns[p].outvars[0])
    return found


def unique_boundaries(program: Program, boundaries: Sequence[Boundary]) -> list[Boundary]:
    """Boundaries sorted by producer, one for each value."""
    values = {program.marked(b.name): b for b in reversed(boundaries)}
    return sorted(values.values(), key=lambda b: b.producer)
