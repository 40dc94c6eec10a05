"""Where a program is cut: its equations, assigned to segments and to what lies between them."""

import bisect
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jrc._errors import name_of
from jrc._jaxpr import INPUT, Program, mark_of
from jrc.remat._policy.check import check_policy
from jrc.remat._policy.resolution import Policy
from jrc.remat._region.effects import split_at_effects
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
    """A range of a program, as positions in it: a segment, or what lies between segments.

    Attributes:
        boundary: The marks whose values it makes; a section between segments has none.
        is_segment: Whether the rule made it a segment.
        recompute: Whether it is recomputed.
        positions: Its equations, in program order.
        saved: The values that it makes, or is given, and that are saved by name although it is
            recomputed, with their action.
    """

    boundary: tuple[str, ...]
    is_segment: bool
    recompute: bool
    positions: tuple[int, ...]
    saved: Mapping[Any, str]


@dataclasses.dataclass(frozen=True, eq=False)
class SectionedProgram:
    """A whole program in sections, and what of the request had no effect.

    Attributes:
        sections: The sections, in program order.
        unused: The boundaries that cut nothing.
        unknown: Those of them that no mark carries.
        too_short: The pairs of boundaries with too little between them.
        policy: The rules.
    """

    sections: tuple[Section, ...]
    unused: tuple[str, ...]
    unknown: tuple[str, ...]
    too_short: tuple[tuple[str, str], ...]
    policy: Policy


def cut_program(program: Program, request: Request, fn: Callable[..., Any]) -> SectionedProgram:
    """Cut a program at named boundaries.

    Args:
        program: The traced function.
        request: The boundaries and the rules.
        fn: The user's function, for errors.
    """
    rule, policy = request.rule, request.policy
    names, unknown = resolve_boundaries(program, request.checkpoints, rule, name_of(fn))
    check_policy(policy, program, name_of(fn))
    live = program.live()
    work = [p for p in range(len(program.eqns)) if live[p] and counts_as_work(program, p)]
    boundaries = {name: locate_boundary(program, name, work) for name in names}
    cutting = [n for n in names if live_parts(program, n)]
    if rule == "partition":
        cutting = [n for n in cutting if boundaries[n].producer != INPUT]
    unused = (*unknown, *(n for n in names if n not in cutting))
    ranges = RULES[rule](unique_boundaries(program, [boundaries[n] for n in cutting]))
    skipped = checked_numbers(request.no_recompute_segments, len(ranges.segments))
    ruled = policy.values_to_save(program, range(len(program.eqns)))
    sections, number = [], 0
    for positions, is_segment in _ranges(program, ranges.segments, work, live):
        recompute = is_segment and number not in skipped and not policy.saves_by_default
        number += is_segment
        sections.append(
            _section(program, positions, cutting, is_segment, recompute, request, ruled)
        )
    return SectionedProgram(tuple(sections), unused, tuple(unknown), ranges.too_short, policy)


def one_segment(program: Program, policy: Policy) -> SectionedProgram:
    """Return the whole program as one segment, which the rules recompute or save."""
    live = program.live()
    positions = [p for p in range(len(program.eqns)) if live[p]]
    request = Request((), "partition", policy, (), ())
    ruled = policy.values_to_save(program, positions)
    recompute = not policy.saves_by_default
    section = _section(program, positions, (), True, recompute, request, ruled)
    return SectionedProgram((section,), (), (), (), policy)


def _ranges(
    program: Program,
    segments: Sequence[tuple[int, int]],
    work: Sequence[int],
    live: Sequence[bool],
) -> list[tuple[list[int], bool]]:
    """All live equations, in segments and what lies between them, in order.

    A mark stays with the value that it names. A broadcast goes to its first reader: in an earlier
    range a large value would be saved in place of a small one.
    """
    edges = sorted({0, len(work), *(edge for segment in segments for edge in segment)})
    of_work = {work[i]: bisect.bisect_right(edges, i) - 1 for i in range(len(work))}
    last = max(len(edges) - 2, 0)
    ranges: list[list[int]] = [[] for _ in range(last + 1)]
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
        ranges[owner].append(p)
    starts = {start for start, _ in segments}
    return [(positions, edges[i] in starts) for i, positions in enumerate(ranges)]


def _section(
    program: Program,
    positions: Sequence[int],
    names: Sequence[str],
    is_segment: bool,
    recompute: bool,
    request: Request,
    ruled: Mapping[Any, str],
) -> Section:
    inside, saved = set(positions), {}
    boundary = tuple(n for n in names if is_segment and last_producer(program, n) in inside)
    for part, has_effects in split_at_effects(program, positions) if recompute else ():
        if not has_effects:
            saved |= saved_in_segment(program, part, boundary, request, ruled)
    return Section(boundary, is_segment, recompute, tuple(positions), saved)
