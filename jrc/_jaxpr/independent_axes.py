"""The independent axes of an equation, of programs inside of it too.

>>> import jax, jax.numpy as jnp
>>> steps = lambda x: jax.lax.scan(lambda c, row: (c + row, c), jnp.zeros(3), x)[0]
>>> eqn = jax.make_jaxpr(steps)(jnp.ones((5, 3))).eqns[-1]
>>> [axis.operands for axis in independent_axes(eqn)]
[(0, 1)]
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn

from jrc._jaxpr.array_constants import with_array_constants
from jrc._jaxpr.atoms import is_variable, shape_of
from jrc._jaxpr.axis_rules import IndependentAxis
from jrc._jaxpr.control_flow import loop_parts
from jrc._jaxpr.custom_derivatives import (
    cotangents_of,
    floating_positions,
    tangents_of,
    traced_rule,
)
from jrc._jaxpr.equations import has_effects, inner_programs
from jrc._jaxpr.inline import inline_all
from jrc._jaxpr.linear_solve import solver_programs
from jrc._jaxpr.primitives import facts_of, primitive_name
from jrc._jaxpr.program import Program
from jrc._jaxpr.slices import Dependent, sliced
from jrc._mesh_axes import is_on_automatic_axes

Axes = tuple[int | None, ...]
Programs = Callable[[Jaxpr], Program]
"""The program of each jaxpr, one for the same jaxpr."""

SUM = -1
"""In the place of the axis of a result that is a sum over slices."""


def independent_axes(
    eqn: JaxprEqn, constructs: Mapping[str, Callable[..., Any]] | None = None
) -> Sequence[IndependentAxis]:
    """Return the axes along which an equation computes each slice by itself.

    Those of a loop, a conditional, a function with a derivative of its own or a `jax.checkpoint`
    region are those of the programs inside. On automatic axes inside of explicit ones there are
    none.

    Args:
        eqn: The equation.
        constructs: The rules of equations with programs inside, if others than those of this file.
    """
    if any(is_on_automatic_axes(v.aval) for v in eqn.outvars):
        return []
    inside = (_INSIDE if constructs is None else constructs).get(primitive_name(eqn))
    if inside is None:
        return facts_of(eqn).axes(eqn)
    # All axes are looked for in the same programs, which remember those of equations inside.
    programs = functools.cache(lambda jaxpr: Program(with_array_constants(inline_all(jaxpr))))
    found: dict[IndependentAxis, None] = {}
    for i, atom in enumerate(eqn.invars):
        for axis, length in enumerate(shape_of(atom) if is_variable(atom) else ()):
            if length > 1 and not any(each.operands[i] == axis for each in found):
                one = inside(eqn, i, axis, programs)
                found |= {one: None} if one else {}
    return list(found)


class AxesOfProgram(NamedTuple):
    """The axis that each input and each result of a program has; see `IndependentAxis`."""

    operands: Axes
    results: Axes
    parts: int
    counts: tuple[tuple[int, str], ...]


def axes_of_program(
    program: Program,
    given: Axes,
    axes_of: Callable[[JaxprEqn], Sequence[IndependentAxis]] = independent_axes,
) -> AxesOfProgram | None:
    """Return the axis that each input and each result of a program has.

    Args:
        program: The program.
        given: Where the inputs have the axis, as far as it is known.
        axes_of: The axes of an equation.

    Returns:
        The axes, `None` for what is the same in all slices, and `SUM` for sums over slices; the
        parts, and the positions that slices read. `None` if the axis is not independent, an input
        is read in slices and as a whole too, or a result is made of sums.
    """
    inputs = program.jaxpr.invars
    axes = {v: a for v, a in zip(inputs, given, strict=True) if a is not None}
    while True:
        try:
            slices = sliced(program, axes, axes_of, inputs_alone=True)
        except Dependent:
            return None
        # What reads another input that is cut too runs on slices as well.
        more = {v: at for v, at in slices.given if v in inputs and v not in axes}
        if not more:
            break
        axes |= more
    places = dict(slices.given)
    before = [program.eqns[p] for p in slices.before]
    whole = {*slices.whole, *(x for eqn in before for x in eqn.invars if is_variable(x))}
    made = {v for eqn in before for v in eqn.outvars}
    is_whole_too = len(places) != len(slices.given) or bool(set(places) & (whole | made))
    is_inside = not set(places) <= set(inputs)
    if is_whole_too or is_inside or any(map(has_effects, before)):
        return None
    outvars = program.jaxpr.outvars
    if any(is_variable(x) and x in slices.late and x not in slices.sums for x in outvars):
        return None
    results = tuple(
        None if not is_variable(x) else SUM if x in slices.sums else slices.axes.get(x)
        for x in outvars
    )
    operands = tuple(places.get(v, axes.get(v)) for v in inputs)
    counts = tuple(each for step in slices.steps for each in step.axis.counts)
    return AxesOfProgram(operands, results, slices.parts, counts)


def _calls(eqn: JaxprEqn, operand: int, axis: int, programs: Programs) -> IndependentAxis | None:
    """Of an equation whose last operands are the inputs of each program inside."""
    jaxprs = inner_programs(eqn)
    first = len(eqn.invars) - len(jaxprs[0].invars)
    if operand < first:
        return None
    axes: Axes = tuple(axis if first + i == operand else None for i in range(len(jaxprs[0].invars)))
    results: Axes = ()
    parts = shape_of(eqn.invars[operand])[axis]
    for _ in range(2):  # what one branch asks for another may not
        for jaxpr in jaxprs:
            found = axes_of_program(programs(jaxpr), axes)
            if found is None or found.counts or (results and found.results != results):
                return None
            axes, results = found.operands, found.results
            parts = math.gcd(parts, found.parts)
    if SUM in results or set(results) == {None}:
        return None
    return IndependentAxis((*(None for _ in range(first)), *axes), results, parts)


def _custom_jvp(
    eqn: JaxprEqn, operand: int, axis: int, programs: Programs
) -> IndependentAxis | None:
    """Of a function with tangents of its own; both must compute slices by themselves."""
    found = _with_own_derivative(eqn, operand, axis, programs)
    derivative = traced_rule(tangents_of, eqn) if found else None
    if found is None or derivative is None:
        return None
    given = [*found.operands, *(found.operands[i] for i in floating_positions(eqn.invars))]
    made = [*found.results, *(found.results[i] for i in floating_positions(eqn.outvars))]
    return _if_same(found, programs(derivative), given, made)


def _custom_vjp(
    eqn: JaxprEqn, operand: int, axis: int, programs: Programs
) -> IndependentAxis | None:
    """Of a function with cotangents of its own; those of what every slice reads are sums."""
    found = _with_own_derivative(eqn, operand, axis, programs)
    derivative = traced_rule(cotangents_of, eqn) if found else None
    if found is None or derivative is None:
        return None
    given = [*found.operands, *(found.results[i] for i in floating_positions(eqn.outvars))]
    cotangents = (found.operands[i] for i in derivative.operands)
    made = [*found.results, *(SUM if at is None else at for at in cotangents)]
    return _if_same(found, programs(derivative.program), given, made)


def _with_own_derivative(
    eqn: JaxprEqn, operand: int, axis: int, programs: Programs
) -> IndependentAxis | None:
    """Like `_calls`; on an explicit mesh the rule was traced for the types of the whole."""
    meshes = [getattr(getattr(x.aval, "sharding", None), "mesh", None) for x in eqn.invars]
    if any(mesh and mesh.explicit_axes for mesh in meshes):
        return None
    return _calls(eqn, operand, axis, programs)


def _if_same(
    found: IndependentAxis, derivative: Program, given: Sequence[Any], made: Sequence[Any]
) -> IndependentAxis | None:
    """The axis of a function, if its derivative has it in the same places."""
    inside = axes_of_program(derivative, tuple(given), _of_values)
    if inside is None or inside.counts or inside[:2] != (tuple(given), tuple(made)):
        return None
    return dataclasses.replace(found, parts=math.gcd(found.parts, inside.parts))


def _of_values(eqn: JaxprEqn) -> Sequence[IndependentAxis]:
    """The axes inside of a derivative: of a function there, not of its own derivative.

    The rule of a function may call the function itself.
    """
    without = {"custom_jvp_call": _calls, "custom_vjp_call": _calls}
    return independent_axes(eqn, {**_INSIDE, **without})


def _scan(eqn: JaxprEqn, operand: int, axis: int, programs: Programs) -> IndependentAxis | None:
    (jaxpr,) = inner_programs(eqn)
    consts, carried = loop_parts(eqn)
    end = consts + carried
    if operand >= end and axis == 0:
        return None  # the axis of the loop itself
    parts = shape_of(eqn.invars[operand])[axis]
    axes: Axes = tuple(
        axis - (i >= end) if i == operand else None for i in range(len(jaxpr.invars))
    )
    while True:
        found = axes_of_program(programs(jaxpr), axes)
        if found is None:
            return None
        inputs, results, count, counts = found
        parts = math.gcd(parts, count)
        if SUM in results or set(results) == {None}:
            return None
        after = tuple(results[i - consts] if consts <= i < end else a for i, a in enumerate(inputs))
        if any(a is not None and a != b for a, b in zip(inputs, after, strict=True)):
            return None  # a carry has the axis elsewhere, or no longer
        if after == axes:
            break
        axes = after
    outer = tuple(a if a is None or i < end else a + 1 for i, a in enumerate(axes))
    made = tuple(a if a is None or i < carried else a + 1 for i, a in enumerate(results))
    return IndependentAxis(outer, made, parts, counts=counts)


def _linear_solve(
    eqn: JaxprEqn, operand: int, axis: int, programs: Programs
) -> IndependentAxis | None:
    """Of a solution: all programs have the axis, where the right sides and solutions have it."""
    solvers = solver_programs(eqn)
    sides = len(eqn.invars) - len(eqn.outvars)
    axes: list[int | None] = [None for _ in eqn.invars]
    axes[operand], parts = axis, shape_of(eqn.invars[operand])[axis]
    before: list[int | None] = []
    while axes != before:
        before = list(axes)
        for each in solvers:
            given = tuple(axes[i] for i in each.operands)
            if set(given) == {None}:
                continue
            found = axes_of_program(programs(each.jaxpr), given)
            if found is None or found.counts or SUM in found.results or None in found.results:
                return None
            for i, at in zip(each.operands, found.operands, strict=True):
                axes[i] = at if axes[i] is None else axes[i]
            for i, at in enumerate(found.results, sides):
                if axes[i] not in (None, at):
                    return None
                axes[i] = at
            parts = math.gcd(parts, found.parts)
    results = tuple(axes[sides:])
    return None if None in results else IndependentAxis(tuple(axes), results, parts)


_INSIDE: dict[str, Callable[[JaxprEqn, int, int, Programs], Any]] = {
    "scan": _scan,
    "custom_linear_solve": _linear_solve,
    "cond": _calls,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    "jit": _calls,
    "remat2": _calls,
    "RematTraced": _calls,
}
