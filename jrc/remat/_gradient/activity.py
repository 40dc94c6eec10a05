"""Activity analysis: the variables that a derivative flows through."""

from collections.abc import Collection, Iterable, Set
from typing import Any

from jrc._jaxpr import Program, is_variable, stops_gradient
from jrc._tree import is_floating


def active_variables(program: Program, inputs: Iterable[Any], wanted: Iterable[Any]) -> set[Any]:
    """Return the variables that depend on these inputs and that these results depend on.

    Args:
        program: The program.
        inputs: The inputs that it is differentiated by.
        wanted: The results that are differentiated; literals among them are ignored.
    """
    varied, useful = set(inputs), {x for x in wanted if is_variable(x)}
    differentiable = [eqn for eqn in program.eqns if not stops_gradient(eqn)]
    for eqn in differentiable:
        if any(is_variable(x) and x in varied for x in eqn.invars):
            varied.update(v for v in eqn.outvars if is_floating(v.aval))
    for eqn in reversed(differentiable):
        if not useful.isdisjoint(eqn.outvars):
            useful.update(x for x in eqn.invars if is_variable(x))
    return varied & useful


def differentiated_outside(
    program: Program,
    equations: Collection[int],
    ends: Iterable[Any],
    active: Set[Any] | None = None,
) -> set[Any]:
    """Return the values that are differentiated outside of some equations.

    What is read inside alone, or only returned beside a loss, is not.

    Args:
        program: The program, differentiated by all its inputs.
        equations: Some of its equations.
        ends: The results that are differentiated; literals among them are ignored.
        active: The values that a derivative flows through, if that is known.
    """
    ends, inside = {x for x in ends if is_variable(x)}, set(equations)
    if active is None:
        active = active_variables(program, program.jaxpr.invars, ends)
    read = {
        x
        for p, eqn in enumerate(program.eqns)
        if p not in inside and not active.isdisjoint(eqn.outvars)
        for x in eqn.invars
        if is_variable(x)
    }
    return (read | ends) & active


def differentiated_results(program: Program, p: int, ends: Iterable[Any]) -> list[int]:
    """Return which results of an equation are differentiated, by their position.

    Args:
        program: As for `differentiated_outside`.
        p: The equation.
        ends: As for `differentiated_outside`.
    """
    found = differentiated_outside(program, [p], ends)
    return [i for i, v in enumerate(program.eqns[p].outvars) if v in found]
