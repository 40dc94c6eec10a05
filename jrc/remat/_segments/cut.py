"""Where a program is cut: its equations dealt out to segments and what lies between them."""

import bisect
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jrc._errors import name_of
from jrc._jaxpr import INPUT, Program, mark_of
from jrc.remat._policy.resolution import Policy
from jrc.remat._segments.boundaries import (
    counts_as_work,
    last_producer,
    live_parts,
    locate_boundary,
    readers,
    resolve_boundaries,
    unique_boundaries,
)
from jrc.remat._segments.cut_rules import RULES
from jrc.remat._segments.request import Request, checked_numbers
from jrc.remat._segments.residuals import saved_in_segment


@dataclasses.dataclass(frozen=True, eq=False)
class Section:
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
class SectionedProgram:
    """The whole program in order, the boundaries that cut nothing, and pairs too close to cut.

    `say` is what the transform's rules say of values, for whoever runs the cuts.
    """

    cuts: tuple[Section, ...]
    unused: tuple[str, ...]
    too_short: tuple[tuple[str, str], ...]
    policy: Policy


def cut_program(
    program: Program, request: Request, *, who: str, fn: Callable[..., Any]
) -> SectionedProgram:
    """Cut a program at named boundaries; errors speak for `who` about `fn`."""
    rule, policy = request.rule, request.policy
    names, unused = resolve_boundaries(program, request.checkpoints, rule, who, name_of(fn))
    policy.check(program, who, name_of(fn))
    live = program.live()
    work = [p for p in range(len(program.eqns)) if live[p] and counts_as_work(program, p)]
    boundaries = {name: locate_boundary(program, name, work) for name in names}
    cutting = [n for n in names if live_parts(program, n)]
    if rule == "partition":
        cutting = [n for n in cutting if boundaries[n].producer != INPUT]
    unused += [n for n in names if n not in cutting]
    ranges = RULES[rule](unique_boundaries(program, [boundaries[n] for n in cutting]))
    skipped = checked_numbers(request.no_recompute_segments, len(ranges.segments), who)
    stretches = _stretches(program, ranges.segments, work, live)
    ruled = policy.values_to_save(program, range(len(program.eqns)))
    cuts, number = [], 0
    for positions, is_segment in stretches:
        recompute = is_segment and number not in skipped and not policy.saves_by_default
        number += is_segment
        cuts.append(_cut(program, positions, cutting, is_segment, recompute, request, ruled))
    return SectionedProgram(tuple(cuts), tuple(unused), ranges.too_short, policy)


def one_segment(program: Program, policy: Policy) -> SectionedProgram:
    """The whole program as one segment, which the rules re-run or keep."""
    live = program.live()
    positions = [p for p in range(len(program.eqns)) if live[p]]
    request = Request((), "partition", policy, (), ())
    ruled = policy.values_to_save(program, positions)
    cut = _cut(program, positions, (), True, not policy.saves_by_default, request, ruled)
    return SectionedProgram((cut,), (), (), policy)


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
) -> Section:
    inside = set(positions)
    boundary = tuple(n for n in names if is_segment and last_producer(program, n) in inside)
    held = saved_in_segment(program, positions, boundary, request, ruled) if recompute else {}
    return Section(boundary, is_segment, recompute, tuple(positions), held)
