"""Which values a segment saves although it is recomputed."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jrc._jaxpr import INPUT, Program, Reads, View, facts_of, is_relu
from jrc._tree import is_typed_key
from jrc.remat._policy.checkpoint_names import SAVED
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
    """Return the values that a segment saves by name, with their action.

    Args:
        program: The program.
        positions: The equations of the segment.
        boundary: The marks whose values the segment makes.
        request: The rule of the cut and the patterns.
        ruled: The values of the whole program that the policy names, with their action.
    """
    leaving = _leaving(program, positions, boundary, request.rule != "partition")
    saved = {var: SAVED for var in leaving if ruled.get(var, SAVED) == SAVED}
    saved |= _saved_by_patterns(program, positions, request.patterns)
    return saved | _saved_by_rules(program, positions, ruled)


def _leaving(
    program: Program, positions: Sequence[int], boundary: Sequence[str], keys: bool
) -> list[Any]:
    """The values that leave the segment and that the segment itself would recompute.

    Other equations inside read them, or their own derivative does: a tanh at a boundary is
    differentiated from the boundary, which is saved anyway. With `keys` random keys are saved
    too, as Paddle's rules do; the bits drawn from them are drawn once more.
    """
    inside = set(positions)
    leaving = {program.unmarked(var) for var in program.crossing(positions)}
    leaving |= {var for name in boundary for var in program.marked(name)}
    own = {_unshaped(program, var) for var in leaving if _is_needed(program, var, inside)}
    return [
        var
        for p in positions
        for var in program.eqns[p].outvars
        if (var in own and _is_own_result(program.eqns[p]))
        or (
            (var in leaving or (keys and is_typed_key(var.aval)))
            and inside.intersection(readers(program, var))
        )
    ]


def _is_own_result(eqn: Any) -> bool:
    return facts_of(eqn).derivative_reads == Reads.RESULT or is_relu(eqn)


def _is_needed(program: Program, var: Any, inside: Collection[int]) -> bool:
    """Whether the derivative of an equation outside reads a value, or a view of it."""
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
    """The value before it was reshaped."""
    while (p := program.producer[var]) != INPUT and facts_of(program.eqns[p]).view is View.RESHAPE:
        if not program.reads(p):
            break
        var = program.unmarked(program.reads(p)[0])
    return var


def _saved_by_rules(
    program: Program, positions: Sequence[int], ruled: Mapping[Any, str]
) -> dict[Any, str]:
    """The values that rules save of those a segment makes, and offload of those it reads.

    An offloaded value is saved by the segment that reads it in its backward pass, not by one that
    only makes it.
    """
    inside = set(positions)
    saved = {}
    for var in (var for p in positions for var in program.eqns[p].outvars if var in ruled):
        if ruled[var] == SAVED or inside.intersection(readers(program, var)):
            saved[var] = ruled[var]
    for var in dict.fromkeys(var for p in positions for var in program.reads(p)):
        action = ruled.get(program.unmarked(var), SAVED)
        if action != SAVED and program.producer[program.unmarked(var)] not in inside:
            saved[var] = action
    return saved


def _saved_by_patterns(
    program: Program, positions: Sequence[int], patterns: Sequence[Pattern]
) -> dict[Any, str]:
    work = [p for p in positions if counts_as_work(program, p)]
    found = (p for pattern in patterns for p in pattern.matches(program, work))
    return {var: SAVED for p in found for var in program.eqns[p].outvars}
