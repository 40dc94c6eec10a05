"""Named values found in a program: where they are made and who reads them."""

import bisect
from collections.abc import Sequence
from typing import Any

from jrc._errors import close_to, listed
from jrc._jaxpr import INPUT, Program, mark_of
from jrc.remat._policy.checkpoint_names import is_own_name
from jrc.remat._segments.cut_rules import Boundary


def resolve_boundaries(
    program: Program, checkpoints: Sequence[str], rule: str, fn: str
) -> tuple[list[str], list[str]]:
    """Return the requested marks, each once, and the names that no mark carries.

    A bare name means all of its marks. Paddle's rules drop unknown names, `"partition"` raises.
    """
    found: dict[str, None] = {}
    unknown = []
    for name in checkpoints:
        same = program.matching_marks(name)
        if not same:
            if rule == "partition" or name.partition("#")[0] in program.hidden_marks:
                raise ValueError(_error(program, name, fn))
            unknown.append(name)
        found |= dict.fromkeys(same)
    return sorted(found, key=list(program.marks).index), unknown


def _error(program: Program, name: str, fn: str) -> str:
    bare = name.partition("#")[0]
    if bare in program.hidden_marks:
        return (
            "checkpoints must name marks outside of loops and other constructs, got "
            f"{name!r}, which stands inside {program.hidden_marks[bare]} of `{fn}`. Mark the "
            "result of that construct instead, or call jrc.recompute_segments on the function "
            "inside it."
        )
    return (
        f"checkpoints must name marks of `{fn}` ({listed(user_marks(program))}), got "
        f"{name!r}{close_to(name, user_marks(program))}. Name a value with jrc.mark(x, name), or "
        "leave the name out."
    )


def user_marks(program: Program) -> list[str]:
    """Return the marks of a program that a user wrote, in order."""
    return [name for name in program.marks if not is_own_name(name.partition("#")[0])]


def counts_as_work(program: Program, p: int) -> bool:
    """Return whether an equation counts: marks and mere broadcasts do not."""
    eqn = program.eqns[p]
    return mark_of(eqn) is None and eqn.primitive.name != "broadcast_in_dim"


def locate_boundary(program: Program, name: str, work: Sequence[int]) -> Boundary:
    """Return a boundary in counted positions; of a pytree, the last value made and first read."""
    producer = bisect.bisect_right(work, last_producer(program, name)) - 1
    read = [
        bisect.bisect_left(work, p) for v in live_parts(program, name) for p in readers(program, v)
    ]
    after = [p for p in read if p > producer]
    return Boundary(name, producer, min(after, default=len(work)))


def last_producer(program: Program, name: str) -> int:
    """Return the last equation that makes a live part of this boundary."""
    return max((program.producer[value] for value in live_parts(program, name)), default=INPUT)


def live_parts(program: Program, name: str) -> list[Any]:
    """Return the parts of a boundary that the result depends on."""
    return [value for value in program.marked(name) if program.consumers.get(value)]


def readers(program: Program, value: Any) -> list[int]:
    """Return the counted equations that read a value, through marks and broadcasts."""
    found = []
    for p in program.consumers.get(value, ()):
        if p == len(program.eqns) or counts_as_work(program, p):
            found.append(p)
        else:
            found += readers(program, program.eqns[p].outvars[0])
    return found


def unique_boundaries(program: Program, boundaries: Sequence[Boundary]) -> list[Boundary]:
    """Return the boundaries sorted by producer, one for each value."""
    values = {program.marked(b.name): b for b in reversed(boundaries)}
    return sorted(values.values(), key=lambda b: b.producer)
