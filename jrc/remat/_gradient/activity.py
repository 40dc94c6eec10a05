"""Activity analysis: the variables that a derivative flows through."""

from collections.abc import Iterable
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
