"""Running a cut program: each segment in a recomputed region, the rest as it is."""

from collections.abc import Sequence
from typing import Any

from jrc._jaxpr import Program, Reads, View, facts_of, mark_of
from jrc.remat._policy.checkpoint_names import SAVED
from jrc.remat._policy.resolution import Policy
from jrc.remat._region.effects import split_at_effects
from jrc.remat._region.interpreter import EquationRange, run_jaxpr
from jrc.remat._region.region import Region, recomputed_region
from jrc.remat._segments.cut import Section, SectionedProgram


def run_sections(
    program: Program,
    sections: SectionedProgram,
    inputs: Sequence[Any],
    region: Region = recomputed_region,
) -> list[Any]:
    """Run a cut program on its inputs and return its results.

    Args:
        program: The program.
        sections: How it is cut.
        inputs: Its inputs.
        region: Runs the body of a segment that is recomputed.
    """
    values: dict[Any, Any] = dict(zip(program.jaxpr.invars, inputs, strict=True))
    for section in sections.sections:
        run_section(program, section, sections.policy, values, region)
    return program.results(values)


def run_section(
    program: Program,
    section: Section,
    policy: Policy,
    values: dict[Any, Any],
    region: Region,
    own_inside: bool = False,
    **options: Any,
) -> None:
    """Run one section, and add the values that it makes to `values`.

    Args:
        program: The program.
        section: The section.
        policy: The rules.
        values: The values of variables.
        region: Runs the body of a segment that is recomputed.
        own_inside: Whether an operator at the end whose derivative reads its own, saved result
            runs inside the region. Outside, JAX may save what its derivative computes from the
            result in its place, such as 1 - y² of a tanh.
        **options: Further fields of `EquationRange`, for a segment that is recomputed.
    """
    if not section.recompute:
        part = _range(program, section.positions, policy, section, options)
        results = part.run_saved(*(values[var] for var in part.invars))
        values |= dict(zip(part.outvars, results, strict=True))
        return
    for positions, has_effects in split_at_effects(program, section.positions):
        if has_effects:
            run_jaxpr(program.cut(positions), values)
        else:
            _run_region(program, positions, section, policy, values, region, own_inside, options)


def _run_region(
    program: Program,
    positions: Sequence[int],
    section: Section,
    policy: Policy,
    values: dict[Any, Any],
    region: Region,
    own_inside: bool,
    options: dict[str, Any],
) -> None:
    outside = _trailing(program, positions, section, own_inside)
    inside = [p for p in positions if p not in outside]
    part = _range(program, inside, policy, section, options)
    results = region(part.run_recomputed, [values[var] for var in part.invars])
    values |= dict(zip(part.outvars, results, strict=True))
    # A region around this one must see what the rules save here too.
    ruled = policy.values_to_save(program, outside)
    named = {var: action for var, action in ruled.items() if program.producer[var] in outside}
    tail = EquationRange(program, outside, program.crossing(outside), Policy(), named)
    results = tail.run_recomputed(*(values[var] for var in tail.invars))
    values |= dict(zip(tail.outvars, results, strict=True))


def _range(
    program: Program,
    positions: Sequence[int],
    policy: Policy,
    section: Section,
    options: dict[str, Any],
) -> EquationRange:
    outvars = program.crossing(positions)
    return EquationRange(program, positions, outvars, policy, section.saved, **options)


def _trailing(
    program: Program, positions: Sequence[int], section: Section, own_inside: bool
) -> list[int]:
    """The last equations that may run outside of the region, because none inside reads them.

    Marks, which another transform finds there; reshapes; and an operator whose derivative reads
    its own, saved result. Saved inside, that result would be saved twice with `jax_remat3`.
    """
    inside, found = set(positions), []
    for p in reversed(positions):
        eqn = program.eqns[p]
        readers = {c for var in eqn.outvars for c in program.consumers.get(var, ())}
        is_view = mark_of(eqn) is not None or facts_of(eqn).view is View.RESHAPE
        is_own = (
            not own_inside
            and facts_of(eqn).derivative_reads == Reads.RESULT
            and section.saved.get(eqn.outvars[0]) == SAVED
        )
        if (is_view or is_own) and readers and not readers & inside:
            found.append(p)
            inside.discard(p)
    return found[::-1]
