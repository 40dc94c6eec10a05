"""Indices that count along an axis, as in `logits[jnp.arange(n), labels]`, as indices of each row.

They are those of gathers, and of scatters (`logits.at[jnp.arange(n), labels].add(x)`), and have a
column for each axis of the operand. Where a column only counts along an axis of the result, that
axis is a batch axis of both, as in `jnp.take_along_axis`: the rows are independent of each other.

>>> import jax, jax.numpy as jnp
>>> picked = lambda logits, labels: logits[jnp.arange(8), labels]
>>> jaxpr = jax.make_jaxpr(picked)(jnp.ones((8, 16)), jnp.ones(8, int)).jaxpr
>>> dimensions = with_batched_indices(jaxpr).eqns[-1].params["dimension_numbers"]
>>> dimensions.start_index_map, dimensions.operand_batching_dims
((1,), (0,))
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jrc._jaxpr.atoms import shape_of
from jrc._jaxpr.axes import dimension_numbers
from jrc._jaxpr.varying_casts import is_cast

_NUMBERS = {
    "gather": (
        "start_index_map",
        "collapsed_slice_dims",
        "operand_batching_dims",
        "start_indices_batching_dims",
    ),
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"),
        (
            "scatter_dims_to_operand_dims",
            "inserted_window_dims",
            "operand_batching_dims",
            "scatter_indices_batching_dims",
        ),
    ),
}
"""The axes of an operand that the columns of an index are of, those that a result lacks, and the
batch axes of the operand and of the index: what JAX calls each."""

Makers = Mapping[Var, JaxprEqn]
"""The equation that makes each variable, but for inputs."""


def with_batched_indices(jaxpr: Jaxpr) -> Jaxpr:
    """Return the program in which an index has a batch axis for each column that only counts."""
    if not any(eqn.primitive.name in _NUMBERS for eqn in jaxpr.eqns):
        return jaxpr
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    return jaxpr.replace(eqns=[_batched(eqn, makers) for eqn in jaxpr.eqns])


def _batched(eqn: JaxprEqn, makers: Makers) -> JaxprEqn:
    names = _NUMBERS.get(eqn.primitive.name)
    columns = _columns(eqn, makers) if names else ()
    if names is None or len(columns) < 2:
        return eqn
    operand, numbers = eqn.invars[0], dimension_numbers(eqn)
    indexed, without, *batch = (getattr(numbers, name) for name in names)
    # Batch axes of the operand, each with that of the index; under `jax.vmap` there are some.
    counted: dict[int, int] = dict(zip(*batch, strict=True))
    left = []
    for column, axis in zip(columns, indexed, strict=True):
        along = _counts_along(column, makers)
        # The last axis of an index is that of its columns.
        is_row = along is not None and shape_of(column)[:-1][along:][:1] == (
            shape_of(operand)[axis],
        )
        if is_row and axis in without and along not in counted.values():
            counted[axis] = along
        else:
            left.append((column, axis))
    if len(left) != 1:
        return eqn
    (column, axis), rows = left[0], sorted(counted)
    others = tuple(each for each in without if each not in counted)
    new = (axis,), others, tuple(rows), tuple(counted[each] for each in rows)
    batched = numbers._replace(**dict(zip(names, new, strict=True)))
    params = eqn.params | {"dimension_numbers": batched}
    return eqn.replace(invars=[operand, column, *eqn.invars[2:]], params=params)


def _columns(eqn: JaxprEqn, makers: Makers) -> Sequence[Any]:
    """The columns of an index, if it was joined from such."""
    index = eqn.invars[1]
    joined = None if isinstance(index, Literal) else makers.get(index)
    if joined is None or joined.primitive.name != "concatenate":
        return ()
    is_last = joined.params["dimension"] == len(shape_of(index)) - 1
    return joined.invars if is_last and all(shape_of(x)[-1] == 1 for x in joined.invars) else ()


def _counts_along(x: Any, makers: Makers) -> int | None:
    """The axis along which a value counts from 0, whatever the other axes are; `None` if none."""
    eqn = None if isinstance(x, Literal) else makers.get(x)
    if eqn is None or not _can_count(x):
        return None
    if is_cast(eqn):
        return _counts_along(eqn.invars[0], makers)
    match eqn.primitive.name:
        case "iota":
            return eqn.params["dimension"]
        case "convert_element_type":
            return _counts_along(eqn.invars[0], makers)
        case "broadcast_in_dim":
            before = _counts_along(eqn.invars[0], makers)
            if before is None:
                return None
            along = eqn.params["broadcast_dimensions"][before]
            return along if shape_of(x)[along] == shape_of(eqn.invars[0])[before] else None
        case "select_n":  # a negative index counts from the end: none is negative
            return _counts_along(eqn.invars[1], makers) if _is_negative(eqn, makers) else None
        case _:
            return None


def _can_count(x: Any) -> bool:
    """Whether all positions along any axis are numbers of the value's dtype."""
    dtype = x.aval.dtype
    most = max(shape_of(x), default=1)
    return np.issubdtype(dtype, np.integer) and most - 1 <= np.iinfo(dtype).max


def _is_negative(select: JaxprEqn, makers: Makers) -> bool:
    """Whether a choice is between a value, and what is taken where it is below zero."""
    which, value, *_ = select.invars
    below = None if isinstance(which, Literal) else makers.get(which)
    if below is None or below.primitive.name != "lt" or below.invars[0] is not value:
        return False
    zero = below.invars[1]
    return isinstance(zero, Literal) and not np.any(zero.val)
