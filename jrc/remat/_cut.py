"""Where a program is cut: boundaries found in it, and its equations dealt out to segments."""

import bisect
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from jrc._errors import close_to, listed, name_of
from jrc._jaxpr import INPUT, Program, call_name, mark_of, primitive_name
from jrc._tree import is_typed_key
from jrc.remat._keep import Rule, check_keep
from jrc.remat._patterns import Pattern, checked_patterns
from jrc.remat._region import opener
from jrc.remat._rules import RULES, Boundary
from jrc.remat._say import HELD, Say

# Operators whose derivative reads their own result and not their argument, and those that only give
# a result another shape.
OWN_RESULT = frozenset("tanh logistic exp exp2 sqrt cbrt".split())
RESHAPES = frozenset("reshape squeeze".split())


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """One stretch of a program, as positions in it: a segment, or what lies between segments.

    Attributes:
        boundary: The marks whose values it makes; a stretch between segments has none.
        is_segment: Whether the rule made it a segment.
        recompute: Whether it is re-run: a segment that is not left alone.
        positions: Its equations, in program order.
        held: Values that it makes, or is given, and that are kept by name although it is re-run,
            with how.
    """

    boundary: tuple[str, ...]
    is_segment: bool
    recompute: bool
    positions: tuple[int, ...]
    held: Mapping[Any, str]


@dataclasses.dataclass(frozen=True, eq=False)
class Cuts:
    """The whole program in order, the boundaries that cut nothing, and pairs too close to cut.

    `say` is what the transform's rules say of values, for whoever runs the cuts.
    """

    cuts: tuple[Cut, ...]
    unused: tuple[str, ...]
    too_short: tuple[tuple[str, str], ...]
    say: Say


@dataclasses.dataclass(frozen=True)
class Request:
    """What a user asks for, besides the function.

    Attributes:
        checkpoints: Names of the boundaries.
        rule: How boundaries become segments.
        say: What is kept inside of segments, by name or by operator.
        patterns: What is kept there, by runs of operators.
        no_recompute_segments: Numbers of segments that are left alone.
    """

    checkpoints: tuple[str, ...]
    rule: str
    say: Say
    patterns: tuple[Pattern, ...]
    no_recompute_segments: tuple[Any, ...]

    def opens(self, eqn: Any) -> bool:
        """Whether a `jit` call is written inline; one that is named itself stays closed."""
        if any(call_name(eqn) in pattern.all for pattern in self.patterns):
            return False
        return bool(self.patterns) or opener(self.say)(eqn)


def cut_program(program: Program, request: Request, *, who: str, fn: Callable[..., Any]) -> Cuts:
    """Cut a program at named boundaries; errors speak for `who` about `fn`."""
    rule, say = request.rule, request.say
    names, unused = _resolve(program, request.checkpoints, rule, who, name_of(fn))
    say.check(program, who, name_of(fn))
    live = program.live()
    work = [p for p in range(len(program.eqns)) if live[p] and is_work(program, p)]
    boundaries = {name: _locate(program, name, work) for name in names}
    cutting = [n for n in names if _used(program, n)]
    if rule == "partition":
        cutting = [n for n in cutting if boundaries[n].producer != INPUT]
    unused += [n for n in names if n not in cutting]
    ranges = RULES[rule](_once_each(program, [boundaries[n] for n in cutting]))
    skipped = _skipped(request.no_recompute_segments, len(ranges.segments), who)
    stretches = _stretches(program, ranges.segments, work, live)
    cuts, number = [], 0
    for positions, is_segment in stretches:
        recompute = is_segment and number not in skipped and not say.leaves_rest
        number += is_segment
        cuts.append(_cut(program, positions, cutting, is_segment, recompute, request))
    return Cuts(tuple(cuts), tuple(unused), ranges.too_short, say)


def one_segment(program: Program, say: Say) -> Cuts:
    """The whole program as one segment, which the rules re-run or keep."""
    live = program.live()
    positions = [p for p in range(len(program.eqns)) if live[p]]
    request = Request((), "partition", say, (), ())
    cut = _cut(program, positions, (), True, not say.leaves_rest, request)
    return Cuts((cut,), (), (), say)


def is_work(program: Program, p: int) -> bool:
    """Whether an equation counts: marks and mere broadcasts do not."""
    eqn = program.eqns[p]
    return mark_of(eqn) is None and eqn.primitive.name != "broadcast_in_dim"


def _locate(program: Program, name: str, work: Sequence[int]) -> Boundary:
    """A boundary in counted positions; of a pytree the last value made and the first one read."""
    producer = bisect.bisect_right(work, _end(program, name)) - 1
    read = [bisect.bisect_left(work, p) for v in _used(program, name) for p in _readers(program, v)]
    after = [p for p in read if p > producer]
    return Boundary(name, producer, min(after, default=len(work)))


def _end(program: Program, name: str) -> int:
    """The last equation that makes a part of this boundary which the result depends on."""
    return max((program.producer[value] for value in _used(program, name)), default=INPUT)


def _used(program: Program, name: str) -> list[Any]:
    """The parts of a boundary that the result depends on."""
    return [value for value in program.marked(name) if program.consumers.get(value)]


def _readers(program: Program, value: Any) -> list[int]:
    """The counted equations that read a value, through marks and broadcasts."""
    found = []
    for p in program.consumers.get(value, ()):
        if p == len(program.eqns) or is_work(program, p):
            found.append(p)
        else:
            found += _readers(program, program.eqns[p].outvars[0])
    return found


def _once_each(program: Program, boundaries: Sequence[Boundary]) -> list[Boundary]:
    """Boundaries sorted by producer, one for each value."""
    values = {program.marked(b.name): b for b in reversed(boundaries)}
    return sorted(values.values(), key=lambda b: b.producer)


def _stretches(
    program: Program,
    segments: Sequence[tuple[int, int]],
    work: Sequence[int],
    live: Sequence[bool],
) -> list[tuple[list[int], bool]]:
    """All live equations, cut into segments and what lies between them, in order.

    A mark stays with the value that it names, a broadcast goes to its first reader: in a
    stretch before that it would be a large value to keep instead of a small one.
    """
    edges = sorted({0, len(work), *(edge for segment in segments for edge in segment)})
    of_work = {work[i]: bisect.bisect_right(edges, i) - 1 for i in range(len(work))}
    last = max(len(edges) - 2, 0)
    stretches: list[list[int]] = [[] for _ in range(last + 1)]
    for p, eqn in enumerate(program.eqns):
        if not live[p]:
            continue
        made = program.producer[program.unmarked(eqn.outvars[0])] if eqn.outvars else p
        source = made if mark_of(eqn) is not None else p
        if source in of_work:
            owner = of_work[source]
        else:
            readers = _readers(program, eqn.outvars[0])
            owner = min((of_work.get(reader, last) for reader in readers), default=last)
        stretches[owner].append(p)
    starts = {start for start, _ in segments}
    return [(stretch, edges[i] in starts) for i, stretch in enumerate(stretches)]


def _cut(
    program: Program,
    positions: Sequence[int],
    names: Sequence[str],
    is_segment: bool,
    recompute: bool,
    request: Request,
) -> Cut:
    inside = set(positions)
    boundary = tuple(n for n in names if is_segment and _end(program, n) in inside)
    held: dict[Any, str] = {}
    if recompute:
        ruled = request.say.held_values(program, range(len(program.eqns)))
        leaving = _held(program, positions, boundary, request.rule != "partition")
        held = {var: HELD for var in leaving if ruled.get(var, HELD) == HELD}
        held |= _held_by_pattern(program, positions, request.patterns)
        held |= _held_by_rule(program, positions, ruled)
    return Cut(boundary, is_segment, recompute, tuple(positions), held)


def _held(
    program: Program, positions: Sequence[int], boundary: Sequence[str], keys: bool
) -> list[Any]:
    """What leaves the segment, and would be made again for the segment's own sake.

    Because others inside read it, or because its own derivative does: a tanh before a boundary is
    differentiated from the boundary. The seeds keep random keys too (`keys`); the bits drawn from
    them are drawn again.
    """
    inside = set(positions)
    kept = {program.unmarked(var) for var in program.crossing(positions)}
    kept |= {var for name in boundary for var in program.marked(name)}
    own = {_unshaped(program, var) for var in kept}
    return [
        var
        for p in positions
        for var in program.eqns[p].outvars
        if (var in own and _is_own_result(program.eqns[p]))
        or (
            (var in kept or (keys and is_typed_key(var.aval)))
            and inside.intersection(_readers(program, var))
        )
    ]


def _is_own_result(eqn: Any) -> bool:
    return primitive_name(eqn) in OWN_RESULT or call_name(eqn) == "relu"


def _unshaped(program: Program, var: Any) -> Any:
    """The value before it was given another shape."""
    while (p := program.producer[var]) != INPUT and program.eqns[p].primitive.name in RESHAPES:
        if not program.reads(p):
            break
        var = program.unmarked(program.reads(p)[0])
    return var


def _held_by_rule(
    program: Program, positions: Sequence[int], ruled: Mapping[Any, str]
) -> dict[Any, str]:
    """What the rules keep of what a segment makes, and offload of what it is given.

    What is offloaded is kept by whoever reads it again: not where it is made and only handed on.
    """
    inside = set(positions)
    held = {}
    for var, how in ruled.items():
        again = how == HELD or inside.intersection(_readers(program, var))
        if program.producer[var] in inside and again:
            held[var] = how
    for var in dict.fromkeys(var for p in positions for var in program.reads(p)):
        how = ruled.get(program.unmarked(var), HELD)
        if how != HELD and program.producer[program.unmarked(var)] not in inside:
            held[var] = how
    return held


def _held_by_pattern(
    program: Program, positions: Sequence[int], patterns: Sequence[Pattern]
) -> dict[Any, str]:
    work = [p for p in positions if is_work(program, p)]
    found = (p for pattern in patterns for p in pattern.matches(program, work))
    return {var: HELD for p in found for var in program.eqns[p].outvars}


def checked_request(
    who: str,
    fn: Any,
    checkpoints: Sequence[str],
    rule: str,
    keep: Rule | None,
    keep_patterns: Sequence[Mapping[str, Any]],
    no_recompute_segments: Sequence[int],
    recompute_collectives: bool,
) -> Request:
    """What is asked for, or an error about what is wrong whatever the program."""
    _check_names(who, fn, checkpoints, rule)
    check_keep(keep, who)
    if isinstance(no_recompute_segments, str) or not isinstance(no_recompute_segments, Iterable):
        raise TypeError(
            f"{who}: no_recompute_segments is a list of numbers; got {no_recompute_segments!r}."
        )
    return Request(
        tuple(checkpoints),
        rule,
        Say(keep, not recompute_collectives),
        checked_patterns(keep_patterns, who),
        tuple(no_recompute_segments),
    )


def _check_names(who: str, fn: Any, checkpoints: Sequence[str], rule: str) -> None:
    if not callable(fn):
        raise TypeError(f"{who}: the first argument is the function to cut; got {fn!r}.")
    if not isinstance(rule, str) or rule not in RULES:
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


def _resolve(
    program: Program, checkpoints: Sequence[str], rule: str, who: str, fn: str
) -> tuple[list[str], list[str]]:
    """The marks that are asked for, each once, and the names that mark nothing.

    A bare name means all of its marks. The seeds' rules drop unknown names, ours refuses them.
    """
    found: dict[str, None] = {}
    unused = []
    for name in checkpoints:
        same = program.called(name)
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


def _skipped(indices: Sequence[int], count: int, who: str) -> frozenset[int]:
    for i in indices:
        if isinstance(i, bool) or not hasattr(i, "__index__"):
            raise TypeError(f"{who}: no_recompute_segments holds segment numbers; got {i!r}.")
        if not 0 <= i < count:
            raise ValueError(
                f"{who}: no_recompute_segments counts the {count} segments from 0 to "
                f"{count - 1}; got {i}. See them with jrc.find_segments."
            )
        if list(indices).count(i) > 1:
            raise ValueError(f"{who}: no_recompute_segments names segment {i} more than once.")
    return frozenset(int(i) for i in indices)
