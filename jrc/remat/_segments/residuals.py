"""Which values a segment keeps although it is re-run."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jrc._jaxpr import INPUT, Program, Reads, View, facts_of, is_relu
from jrc._tree import is_typed_key
from jrc.remat._policy.resolution import SAVED
from jrc.remat._region.recompute_groups import is_view, needs_arguments
from jrc.remat._segments.boundaries import counts_as_work, readers
from jrc.remat._segments.keep_patterns import Pattern
from jrc.remat._segments.request import Request


def saved_in_segment(
    program: Program,
    positions: Sequence[int],
    boundary: Sequence[str],
    request: Request,
    ruled: Mapping[Any, str],
) -> dict[Any, str]:
    """The values that these equations make, or are given, and that are held by name, with how.

    `ruled` has what the rules say of all values of the program.
    """
    leaving = _leaving(program, positions, boundary, request.rule != "partition")
    held = {var: SAVED for var in leaving if ruled.get(var, SAVED) == SAVED}
    held |= _held_by_pattern(program, positions, request.patterns)
    return held | _held_by_rule(program, positions, ruled)


def _leaving(
    program: Program, positions: Sequence[int], boundary: Sequence[str], keys: bool
) -> list[Any]:
    """What leaves the segment, and would be made again for the segment's own sake.

    Because others inside read it, or because its own derivative does: a tanh before a boundary is
    differentiated from the boundary, if that is there anyway. The seeds keep random keys too
    (`keys`); the bits drawn from them are drawn again.
    """
    inside = set(positions)
    kept = {program.unmarked(var) for var in program.crossing(positions)}
    kept |= {var for name in boundary for var in program.marked(name)}
    own = {_unshaped(program, var) for var in kept if _is_needed(program, var, inside)}
    return [
        var
        for p in positions
        for var in program.eqns[p].outvars
        if (var in own and _is_own_result(program.eqns[p]))
        or (
            (var in kept or (keys and is_typed_key(var.aval)))
            and inside.intersection(readers(program, var))
        )
    ]


def _is_own_result(eqn: Any) -> bool:
    return facts_of(eqn).derivative_reads == Reads.RESULT or is_relu(eqn)


def _is_needed(program: Program, var: Any, inside: Collection[int]) -> bool:
    """Whether the derivative of something outside reads a value, in whatever shape."""
    for p in program.consumers.get(var, ()):
        if p == len(program.eqns):
            return True
        eqn = program.eqns[p]
        if p not in inside and needs_arguments(eqn):
            return True
        if is_view(eqn) and any(_is_needed(program, v, inside) for v in eqn.outvars):
            return True
    return False


def _unshaped(program: Program, var: Any) -> Any:
    """The value before it was given another shape."""
    while (p := program.producer[var]) != INPUT and facts_of(program.eqns[p]).view is View.RESHAPE:
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
    for var in (var for p in positions for var in program.eqns[p].outvars if var in ruled):
        if ruled[var] == SAVED or inside.intersection(readers(program, var)):
            held[var] = ruled[var]
    for var in dict.fromkeys(var for p in positions for var in program.reads(p)):
        how = ruled.get(program.unmarked(var), SAVED)
        if how != SAVED and program.producer[program.unmarked(var)] not in inside:
            held[var] = how
    return held


def _held_by_pattern(
    program: Program, positions: Sequence[int], patterns: Sequence[Pattern]
) -> dict[Any, str]:
    work = [p for p in positions if counts_as_work(program, p)]
    found = (p for pattern in patterns for p in pattern.matches(program, work))
    return {var: SAVED for p in found for var in program.eqns[p].outvars}
