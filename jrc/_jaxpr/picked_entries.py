"""Scatters of one entry of each row onto zeros, as a choice of each entry by its position.

The gradient of a cross-entropy with integer labels adds one number to each row of logits, at its
label. A scatter needs whole rows. Whether an entry is that of the label, each entry says by itself:
slices along any axis are independent. A loss over all pairs has labels along both.

>>> import jax, jax.numpy as jnp
>>> from jrc._jaxpr.inline import inline_all
>>> picked = lambda x, i: jnp.sum(jnp.take_along_axis(x, i[:, None], axis=1))
>>> jaxpr = jax.make_jaxpr(jax.grad(picked))(jnp.ones((4, 5)), jnp.zeros(4, int))
>>> program = Program(inline_all(jaxpr))
>>> [name for eqn in program.eqns if (name := eqn.primitive.name) in ("scatter-add", "select_n")]
['select_n', 'scatter-add']
>>> program = with_entries_by_position(program)
>>> [name for eqn in program.eqns if (name := eqn.primitive.name) in ("scatter-add", "select_n")]
['select_n', 'select_n']
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.lax import GatherScatterMode

from jrc._jaxpr.atoms import abstract, shape_of
from jrc._jaxpr.axes import dimension_numbers
from jrc._jaxpr.axis_slices import lies_across
from jrc._jaxpr.inline import inline_all, splice
from jrc._jaxpr.program import Program
from jrc._jaxpr.sums_onto_zeros import zeros_below
from jrc._tree import varying_axes


def with_entries_by_position(program: Program) -> Program:
    """Return the program in which no scatter puts one entry of each row onto zeros.

    Args:
        program: The program, without `jit` calls.

    Returns:
        The program itself, where no scatter does.
    """
    rows = {p: found for p, eqn in enumerate(program.eqns) if (found := _rows(program, eqn))}
    if not rows:
        return program
    eqns = [
        new
        for p, eqn in enumerate(program.eqns)
        for new in (_by_position(eqn, rows[p]) if p in rows else [eqn])
    ]
    return Program(program.jaxpr.replace(eqns=eqns))


class _Rows(NamedTuple):
    """What a scatter of one entry of each row says.

    Attributes:
        axis: The axis of a result's rows.
        index: For each other axis of the index than that of its columns, its axis of the result;
            `None` for one of a single entry.
        updates: The same of the updates.
    """

    axis: int
    index: tuple[int | None, ...]
    updates: tuple[int | None, ...]


def _rows(program: Program, eqn: JaxprEqn) -> _Rows | None:
    """What an equation says, if it scatters one entry of each row onto zeros."""
    if not zeros_below(program, eqn):
        return None
    operand, index, updates = eqn.invars
    numbers, shape = dimension_numbers(eqn), shape_of(operand)
    if any(lies_across(x, axis) for x in eqn.invars for axis in range(len(shape_of(x)))):
        return None
    if any(map(varying_axes, eqn.invars)) or len(numbers.scatter_dims_to_operand_dims) != 1:
        return None
    (axis,) = numbers.scatter_dims_to_operand_dims
    batch = dict(
        zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True)
    )
    places = range(len(shape_of(index)) - 1)
    of_index = tuple(batch.get(place) for place in places)
    is_one = all(at is not None or shape_of(index)[i] == 1 for i, at in enumerate(of_index))
    without = (*numbers.inserted_window_dims, *batch.values())
    windows = [i for i in range(len(shape)) if i not in without]
    window, place = iter(windows), iter(of_index)
    of_updates = tuple(
        next(window) if i in numbers.update_window_dims else next(place)
        for i in range(len(shape_of(updates)))
    )
    if axis in of_updates:  # a window along the row, of one entry
        at = of_updates.index(axis)
        is_one = is_one and shape_of(updates)[at] == 1
        of_updates = tuple(None if each == axis else each for each in of_updates)
    if not is_one:
        return None
    for of in (of_index, of_updates):
        kept = [at for at in of if at is not None]
        if kept != sorted(kept):
            return None
    is_whole = all(
        at is None or shape_of(updates)[i] == shape[at] for i, at in enumerate(of_updates)
    )
    return _Rows(axis, of_index, of_updates) if is_whole else None


def _by_position(eqn: JaxprEqn, rows: _Rows) -> list[JaxprEqn]:
    """The equations that make the same, each entry by itself."""
    _, index, updates = eqn.invars
    shape, mode = shape_of(eqn.outvars[0]), eqn.params["mode"]

    def along(x: Any, axes: tuple[int | None, ...]) -> jax.Array:
        short = [i for i, at in enumerate(axes) if at is None]
        kept = [at for at in axes if at is not None]
        return jax.lax.broadcast_in_dim(jax.lax.squeeze(x, short), shape, kept)

    def chosen(index: jax.Array, updates: jax.Array) -> jax.Array:
        if shape[rows.axis] - 1 > jnp.iinfo(index.dtype).max:
            index = index.astype(jnp.int32)
        if mode == GatherScatterMode.CLIP:
            index = jnp.clip(index, 0, shape[rows.axis] - 1)
        label = along(index, (*rows.index, None))
        position = jax.lax.broadcasted_iota(index.dtype, shape, rows.axis)
        zeros = jax.lax.full(shape, 0, updates.dtype)
        return jax.lax.select(position == label, along(updates, rows.updates), zeros)

    made = inline_all(jax.make_jaxpr(chosen)(abstract(index), abstract(updates)))
    eqns, results = splice(made, [index, updates])
    assert eqns[-1].outvars == results
    eqns[-1] = eqns[-1].replace(outvars=eqn.outvars)
    return [each.replace(source_info=eqn.source_info) for each in eqns]
