"""Reductions over several axes of a value, in two steps: over some of them, and over the others.

The largest entry of a matrix of distances needs all of it. The largest of each row needs that row
alone: a slice of rows gives a slice of them.

>>> import jax, jax.numpy as jnp
>>> program = Program(jax.make_jaxpr(jnp.max)(jnp.ones((4, 5))))
>>> steps = reductions_over_several(program, differentiated=[])
>>> [v.aval.shape for eqn in with_reductions_in_steps(program, steps).eqns for v in eqn.outvars]
[(4,), ()]
"""

from collections.abc import Collection, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Var
from jax.sharding import NamedSharding, PartitionSpec

from jrc._jaxpr.atoms import abstract, is_variable, shape_of
from jrc._jaxpr.axes import reduced_axes
from jrc._jaxpr.axis_slices import lies_across
from jrc._jaxpr.inline import inline_all, splice
from jrc._jaxpr.primitives import primitive_name
from jrc._jaxpr.program import INPUT, Program
from jrc._tree import varying_axes

_PLACES = {"argmax": jax.lax.argmax, "argmin": jax.lax.argmin}
_LARGEST = {"argmax": jax.lax.reduce_max, "argmin": jax.lax.reduce_min}
_IN_ANY_ORDER = ("reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod")


def reductions_over_several(program: Program, differentiated: Collection[Any]) -> list[int]:
    """Return the reductions over several axes that may be made in two steps.

    Sums are left out, which are sums over any of their axes. The place of the largest entry of all
    is among them: `jnp.argmax` of an array without an axis.

    Args:
        program: The program.
        differentiated: Values through which a derivative flows. Reductions to these are left out:
            the derivative of a maximum goes to equal entries in equal parts.
    """
    return [
        p
        for p, eqn in enumerate(program.eqns)
        if _flattened(program, eqn) is not None
        or primitive_name(eqn) in _IN_ANY_ORDER
        and eqn.outvars[0] not in differentiated
        and len(_long(eqn)) > 1
        and eqn.params.get("out_sharding") is None  # of the result, and not of the first step
    ]


def with_reductions_in_steps(program: Program, positions: Collection[int]) -> Program:
    """Return the program in which some reductions are made in two steps.

    Args:
        program: The program.
        positions: The reductions, of `reductions_over_several`.
    """
    if not positions:
        return program
    eqns = [
        new
        for p, eqn in enumerate(program.eqns)
        for new in (_in_steps(program, eqn) if p in positions else [eqn])
    ]
    return Program(program.jaxpr.replace(eqns=eqns))


def _flattened(program: Program, eqn: JaxprEqn) -> Any:
    """The array of several axes of which an equation finds the largest of all; else `None`."""
    if primitive_name(eqn) not in _PLACES or not is_variable(eqn.invars[0]):
        return None
    p = program.producer[eqn.invars[0]]
    if p == INPUT or primitive_name(program.eqns[p]) != "reshape":
        return None
    (x, *_) = program.eqns[p].invars
    if len(shape_of(eqn.invars[0])) > 1 or not is_variable(x) or varying_axes(x):
        return None
    is_split = any(lies_across(x, axis) for axis in range(len(shape_of(x))))
    return None if is_split or sum(n > 1 for n in shape_of(x)) < 2 else x


def _place_in_steps(x: Any, eqn: JaxprEqn) -> list[JaxprEqn]:
    """The largest of each row with its place, and the first of the rows that has the largest."""
    kind, dtype = primitive_name(eqn), eqn.params["index_dtype"]
    rows = next(n for n in shape_of(x) if n > 1)

    def place(x: Any) -> Any:
        x = x.reshape(rows, -1)
        row = _PLACES[kind](_LARGEST[kind](x, (1,)), 0, dtype)
        inside = jax.lax.dynamic_index_in_dim(_PLACES[kind](x, 1, dtype), row, keepdims=False)
        return row * np.array(x.shape[1], dtype) + inside

    eqns, results = splice(inline_all(jax.make_jaxpr(place)(abstract(x))), [x])
    last = eqns[-1].replace(outvars=[eqn.outvars[0]])
    assert eqns[-1].outvars == results
    return [each.replace(source_info=eqn.source_info) for each in (*eqns[:-1], last)]


def _in_steps(program: Program, eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    flattened = _flattened(program, eqn)
    if flattened is not None:
        yield from _place_in_steps(flattened, eqn)
        return
    x, reduced = eqn.invars[0], reduced_axes(eqn)
    first = _reduced_first(program, eqn)
    kept = [axis for axis in range(len(shape_of(x))) if axis not in first]
    rest = tuple(place for place, axis in enumerate(kept) if axis in reduced)
    rows = Var(_kept(x.aval, kept))
    yield eqn.replace(outvars=[rows], params=eqn.params | {"axes": first})
    yield eqn.replace(invars=[rows], params=eqn.params | {"axes": rest})


def _reduced_first(program: Program, eqn: JaxprEqn) -> tuple[int, ...]:
    """The axes that are reduced first: those that another reduction reduces, or the last one."""
    x, long = eqn.invars[0], _long(eqn)
    found = long[-1:]
    for p in program.consumers.get(x, ()) if is_variable(x) else ():
        axes = reduced_axes(program.eqns[p]) if p < len(program.eqns) else ()
        both = [axis for axis in long if axis in axes]
        if both and len(both) < len(long):
            found = both
            break
    short = [axis for axis in reduced_axes(eqn) if axis not in long]
    return tuple(sorted([*found, *short]))


def _long(eqn: JaxprEqn) -> list[int]:
    """The axes that are reduced and have several entries."""
    shape = shape_of(eqn.invars[0])
    return [axis for axis in sorted(reduced_axes(eqn)) if shape[axis] > 1]


def _kept(aval: Any, axes: Collection[int]) -> Any:
    """The type of a value of which some axes are left."""
    shape = tuple(aval.shape[axis] for axis in axes)
    sharding = getattr(aval, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return aval.update(shape=shape)
    spec = (*sharding.spec, *(None for _ in aval.shape))
    new = NamedSharding(sharding.mesh, PartitionSpec(*(spec[axis] for axis in axes)))
    return aval.update(shape=shape, sharding=new)
