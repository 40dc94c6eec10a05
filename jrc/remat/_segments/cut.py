"""Where a program is cut: its equations dealt out to segments and what lies between them."""

import bisect
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jrc._errors import name_of
from jrc._jaxpr import INPUT, Program, mark_of
from jrc.remat._policy.resolution import Say
from jrc.remat._segments.boundaries import (
    is_work,
    last_producer,
    live_parts,
    locate,
    once_each,
    readers,
    resolve,
)
from jrc.remat._segments.cut_rules import RULES
from jrc.remat._segments.request import Request, checked_numbers
from jrc.remat._segments.residuals import held_in


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


def cut_program(program: Program, request: Request, *, who: str, fn: Callable[..., Any]) -> Cuts:
    """Cut a program at named boundaries; errors speak for `who` about `fn`."""
    rule, say = request.rule, request.say
    names, unused = resolve(program, request.checkpoints, rule, who, name_of(fn))
    say.check(program, who, name_of(fn))
    live = program.live()
    work = [p for p in range(len(program.eqns)) if live[p] and is_work(program, p)]
    boundaries = {name: locate(program, name, work) for name in names}
    cutting = [n for n in names if live_parts(program, n)]
    if rule == "partition":
        cutting = [n for n in cutting if boundaries[n].producer != INPUT]
    unused += [n for n in names if n not in cutting]
    ranges = RULES[rule](once_each(program, [boundaries[n] for n in cutting]))
    skipped = checked_numbers(request.no_recompute_segments, len(ranges.segments), who)
    stretches = _stretches(program, ranges.segments, work, live)
    ruled = say.held_values(program, range(len(program.eqns)))
    cuts, number = [], 0
    for positions, is_segment in stretches:
        recompute = is_segment and number not in skipped and not say.leaves_rest
        number += is_segment
        cuts.append(_cut(program, positions, cutting, is_segment, recompute, request, ruled))
    return Cuts(tuple(cuts), tuple(unused), ranges.too_short, say)


def one_segment(program: Program, say: Say) -> Cuts:
    """The whole program as one segment, which the rules re-run or keep."""
    live = program.live()
    positions = [p for p in range(len(program.eqns)) if live[p]]
    request = Request((), "partition", say, (), ())
    ruled = say.held_values(program, positions)
    cut = _cut(program, positions, (), True, not say.leaves_rest, request, ruled)
    return Cuts((cut,), (), (), say)


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
            reading = readers(program, eqn.outvars[0])
            owner = min((of_work.get(reader, last) for reader in reading), default=last)
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
    ruled: Mapping[Any, str],
) -> Cut:
    inside = set(positions)
    boundary = tuple(n for n in names if is_segment and last_producer(program, n) in inside)
    held = held_in(program, positions, boundary, request, ruled) if recompute else {}
    return Cut(boundary, is_segment, recompute, tuple(positions), held)
