"""Sums that are scattered onto zeros: what each slice of the updates gives is added up.

A message-passing layer sums the messages of all edges at their nodes. Edges are independent of each
other: slices of them may be summed one after the other.

>>> import jax, jax.numpy as jnp
>>> from jrc._jaxpr.independent_axes import independent_axes
>>> sums = lambda messages, nodes: jnp.zeros((5, 3)).at[nodes].add(messages)
>>> from jrc._jaxpr.inline import inline_all
>>> program = Program(inline_all(jax.make_jaxpr(sums)(jnp.ones((8, 3)), jnp.zeros(8, int))))
>>> axes = with_sums_onto_zeros(program, independent_axes)
>>> [axis.operands for axis in axes(program.eqns[-1]) if axis.is_summed]
[(None, 0, 0)]
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Var

from jrc._jaxpr.atoms import shape_of
from jrc._jaxpr.axes import dimension_numbers
from jrc._jaxpr.axis_rules import IndependentAxis
from jrc._jaxpr.made_inside import AxesOf, remembered
from jrc._jaxpr.primitives import primitive_name
from jrc._jaxpr.program import INPUT, Program


def with_sums_onto_zeros(program: Program, independent_axes: AxesOf) -> AxesOf:
    """Return the axes of a program's equations, those of updates that are summed onto zeros too.

    Args:
        program: The program.
        independent_axes: The axes of an equation by itself, see `IndependentAxis`.
    """
    alone = remembered(program, independent_axes)

    def axes(eqn: JaxprEqn) -> Sequence[IndependentAxis]:
        found = alone(eqn)
        if zeros_below(program, eqn):
            found = [*found, *_axes_of_updates(eqn)]
        return found

    return axes


def zeros_below(program: Program, eqn: JaxprEqn) -> list[int]:
    """Return the equations that make the zeros which an equation scatters a sum onto, if it does.

    Args:
        program: The program.
        eqn: An equation of it.
    """
    if primitive_name(eqn) != "scatter-add":
        return []
    return made_as_zeros(program, eqn.invars[0]) or []


def made_as_zeros(program: Program, x: Any) -> list[int] | None:
    """Return the equations that make a value which is a broadcast zero; `None` if it is none."""
    found: list[int] = []
    while isinstance(x, Var):
        p = program.producer[x]
        if p == INPUT or primitive_name(program.eqns[p]) != "broadcast_in_dim":
            return None
        found.append(p)
        x = program.eqns[p].invars[0]
    return found if x.val == 0 else None


def _axes_of_updates(eqn: JaxprEqn) -> list[IndependentAxis]:
    """The axes along which updates are added where their indices say, each by itself."""
    numbers, shape = dimension_numbers(eqn), shape_of(eqn.invars[2])
    scattered = [axis for axis in range(len(shape)) if axis not in numbers.update_window_dims]
    return [
        IndependentAxis((None, place, axis), (None,), shape[axis], is_summed=True)
        for place, axis in enumerate(scattered)
        if place not in numbers.scatter_indices_batching_dims and shape[axis] > 1
    ]
