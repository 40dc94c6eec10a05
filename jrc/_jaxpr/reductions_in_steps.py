"""Reductions over all axes of a value, in two steps: over all axes but one, and over that one.

The largest entry of a matrix of distances needs all of it. The largest of each row needs that row
alone: a slice of rows gives a slice of them.

>>> import jax, jax.numpy as jnp
>>> program = Program(jax.make_jaxpr(jnp.max)(jnp.ones((4, 5))).eqns[0].params["jaxpr"].jaxpr)
>>> [v.aval.shape for eqn in with_reductions_in_steps(program, []).eqns for v in eqn.outvars]
[(4,), ()]
"""

from collections.abc import Iterable, Iterator
from typing import Any

from jax.extend.core import JaxprEqn, Var

from jrc._jaxpr.atoms import is_variable, shape_of
from jrc._jaxpr.axes import reduced_axes
from jrc._jaxpr.primitives import primitive_name
from jrc._jaxpr.program import Program

_IN_ANY_ORDER = ("reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod")


def with_reductions_in_steps(program: Program, differentiated: Iterable[Any]) -> Program:
    """Return the program in which a reduction over all axes of a value is made in two steps.

    Sums are left out, which are sums over any of their axes.

    Args:
        program: The program.
        differentiated: Values through which a derivative flows. Reductions of them stay: the
            derivative of a maximum goes to equal entries in equal parts.
    """
    kept = set(differentiated)
    eqns = [new for eqn in program.eqns for new in _in_steps(program, eqn, kept)]
    return Program(program.jaxpr.replace(eqns=eqns)) if len(eqns) > len(program.eqns) else program


def _in_steps(program: Program, eqn: JaxprEqn, differentiated: set[Any]) -> Iterator[JaxprEqn]:
    if primitive_name(eqn) not in _IN_ANY_ORDER or not differentiated.isdisjoint(eqn.outvars):
        yield eqn
        return
    (x, *_), (out,), shape = eqn.invars, eqn.outvars, shape_of(eqn.invars[0])
    long = [axis for axis, length in enumerate(shape) if length > 1]
    is_split = any(tuple(getattr(getattr(x.aval, "sharding", None), "spec", ()) or ()))
    if len(long) < 2 or set(long) - set(reduced_axes(eqn)) or shape_of(out) or is_split:
        yield eqn
        return
    last = next((axis for axis in long if _is_kept_elsewhere(program, x, axis)), long[0])
    aval: Any = x.aval
    rows = Var(aval.update(shape=(shape[last],)))
    others = tuple(axis for axis in range(len(shape)) if axis != last)
    yield eqn.replace(outvars=[rows], params=eqn.params | {"axes": others})
    yield eqn.replace(invars=[rows], params=eqn.params | {"axes": (0,)})


def _is_kept_elsewhere(program: Program, x: Any, axis: int) -> bool:
    """Whether another reduction of the value has an axis in its result."""
    readers = program.consumers.get(x, ()) if is_variable(x) else ()
    others = [reduced_axes(program.eqns[p]) for p in readers if p < len(program.eqns)]
    return any(axes and axis not in axes for axes in others)
