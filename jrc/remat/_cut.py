"""Where a program is cut: the rule that turns boundaries into segments."""

import bisect
import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

from jrc._errors import close_to, listed, name_of
from jrc._jaxpr import INPUT, Program, mark_of

RULES = ("partition",)

# Operators whose derivative reads their own result and not their argument, and the two that only
# give a result another shape.
_OWN_RESULT = frozenset("tanh logistic exp exp2 sqrt rsqrt cbrt reshape squeeze".split())


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """One segment as positions in a program.

    The tail is what ends the segment and needs no re-run for its own derivative: it runs outside
    of the re-run body. A tanh before a boundary is differentiated from the boundary itself, so
    what feeds it need not be re-run to make it again.
    """

    boundary: tuple[str, ...]
    recompute: bool
    body: tuple[int, ...]
    tail: tuple[int, ...]

    @property
    def positions(self) -> tuple[int, ...]:
        """Body and tail in program order."""
        return tuple(sorted(self.body + self.tail))


@dataclasses.dataclass(frozen=True, eq=False)
class Cuts:
    """The whole program as segments in order, and the boundaries that cut nothing."""

    cuts: tuple[Cut, ...]
    unused: tuple[str, ...]


def cut_program(
    program: Program,
    checkpoints: Sequence[str],
    rule: str,
    *,
    who: str,
    fn: Callable[..., Any],
    no_recompute_segments: Sequence[int] = (),
) -> Cuts:
    """Cut a program at named boundaries; errors speak for `who` about `fn`."""
    check_request(checkpoints, rule, who)
    names = _resolve(program, checkpoints, who, name_of(fn))
    live = program.live()
    ends: dict[int, list[str]] = {}
    unused = []
    for name in names:
        if (end := _producer(program, name)) != INPUT and live[end]:
            ends.setdefault(end, []).append(name)
        else:
            unused.append(name)
    skipped = _skipped(no_recompute_segments, len(ends), who)
    cuts = []
    for i, span in enumerate(_spans(program, sorted(ends), live)):
        boundary = tuple(ends[sorted(ends)[i]]) if i < len(ends) else ()
        recompute = bool(boundary) and i not in skipped
        tail = _tail(program, span) if recompute else ()
        body = tuple(p for p in span if p not in tail)
        cuts.append(Cut(boundary, recompute, body, tail))
    return Cuts(tuple(cuts), tuple(unused))


def check_request(checkpoints: Sequence[str], rule: str, who: str) -> None:
    """Refuse what is wrong whatever the program: an unknown rule, names that are no strings."""
    if rule not in RULES:
        raise ValueError(f"{who}: rule is one of {listed(RULES)}; got {rule!r}.")
    if isinstance(checkpoints, str) or not isinstance(checkpoints, Collection):
        raise TypeError(
            f"{who}: checkpoints is a list of mark names; got {type(checkpoints).__name__} "
            f"{checkpoints!r}. Write checkpoints=['block_0', 'block_1']."
        )
    for name in checkpoints:
        if not isinstance(name, str):
            raise TypeError(
                f"{who}: a boundary is the name of a mark, a string; got {type(name).__name__}. "
                "Mark the value with jrc.mark(x, 'name') and pass 'name'."
            )


def _spans(program: Program, ends: Sequence[int], live: Sequence[bool]) -> list[list[int]]:
    """The equations of each segment and of the rest; a mark stays with the value it names."""
    spans: list[list[int]] = [[] for _ in range(len(ends) + 1)]
    for p, eqn in enumerate(program.eqns):
        if live[p]:
            at = p
            if mark_of(eqn) is not None:
                at = max(program.producer[program.unmarked(eqn.outvars[0])], 0)
            spans[bisect.bisect_left(ends, at)].append(p)
    return spans


def _resolve(program: Program, checkpoints: Sequence[str], who: str, fn: str) -> list[str]:
    """The marks that are asked for, each once; a bare name means all of its marks."""
    found: dict[str, None] = {}
    for name in checkpoints:
        same = [known for known in program.marks if known.partition("#")[0] == name]
        if name in program.marks and "#" in name:
            same = [name]
        if not same:
            raise ValueError(_unknown(program, name, who, fn))
        found |= dict.fromkeys(same)
    return sorted(found, key=list(program.marks).index)


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


def _producer(program: Program, name: str) -> int:
    """The last equation that makes a part of this boundary."""
    return max(program.producer[value] for value in program.marked(name))


def _skipped(indices: Sequence[int], count: int, who: str) -> frozenset[int]:
    chosen = list(indices)
    for i in chosen:
        if isinstance(i, bool) or not isinstance(i, int):
            raise TypeError(f"{who}: no_recompute_segments holds segment numbers; got {i!r}.")
        if not 0 <= i < count:
            raise ValueError(
                f"{who}: no_recompute_segments counts the {count} segments from 0 to "
                f"{count - 1}; got {i}. See them with jrc.find_segments."
            )
        if chosen.count(i) > 1:
            raise ValueError(f"{who}: no_recompute_segments names segment {i} more than once.")
    return frozenset(chosen)


def _tail(program: Program, span: Sequence[int]) -> tuple[int, ...]:
    """The equations at a segment's end that need not be inside the re-run body."""
    inside, tail = set(span), []
    for p in reversed(span):
        eqn = program.eqns[p]
        readers = {c for var in eqn.outvars for c in program.consumers.get(var, ())}
        fits = mark_of(eqn) is not None or eqn.primitive.name in _OWN_RESULT
        if fits and readers and not readers & inside:
            tail.append(p)
            inside.discard(p)
    return tuple(reversed(tail))
