"""The axes that an equation works along: contracted, batch, free, reduced.

>>> import jax, jax.numpy as jnp
>>> product = lambda x, w: jnp.einsum("blf,bfw->blw", x, w)
>>> (eqn,) = jax.make_jaxpr(product)(jnp.ones((2, 4, 8)), jnp.ones((2, 8, 3))).eqns
>>> operand_axes(eqn, 0)
OperandAxes(batch=(0,), free=(1,), contracted=(2,))
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn


class OperandAxes(NamedTuple):
    """The axes of one operand of a `dot_general`; each axis is in one of the three.

    Attributes:
        batch: Those that both operands and the result have, in the order of the result.
        free: Those that the result has from this operand alone, in rising order.
        contracted: Those that are summed over, in the order of the other operand's.
    """

    batch: tuple[int, ...]
    free: tuple[int, ...]
    contracted: tuple[int, ...]


def dimension_numbers(eqn: JaxprEqn) -> Any:
    """Return the dimension numbers of a product or a convolution, in JAX's form for each.

    Of a `dot_general` `((contracted, contracted), (batch, batch))`, of a `ragged_dot_general` a
    `jax.lax.RaggedDotDimensionNumbers`, of a convolution a `jax.lax.ConvDimensionNumbers`.
    """
    is_ragged = eqn.primitive.name == "ragged_dot_general"
    return eqn.params["ragged_dot_dimension_numbers" if is_ragged else "dimension_numbers"]


def is_convolution(eqn: JaxprEqn) -> bool:
    """Return whether this is a convolution."""
    return eqn.primitive.name == "conv_general_dilated"


def has_channels_last(eqn: JaxprEqn) -> bool:
    """Return whether a convolution's images have their channels last, and its kernel too.

    >>> import jax, jax.numpy as jnp
    >>> image, kernel = jnp.ones((1, 8, 8, 3)), jnp.ones((3, 3, 3, 4))
    >>> names = "NHWC", "HWIO", "NHWC"
    >>> convolve = jax.lax.conv_general_dilated
    >>> run = lambda x, k: convolve(x, k, (1, 1), "SAME", dimension_numbers=names)
    >>> has_channels_last(jax.make_jaxpr(run)(image, kernel).eqns[0])
    True
    """
    numbers = dimension_numbers(eqn)
    last = len(numbers.lhs_spec) - 1
    image = (0, last, *range(1, last))
    kernel = (last, last - 1, *range(last - 1))
    return tuple(map(tuple, numbers)) == (image, kernel, image)


def is_plain_convolution(eqn: JaxprEqn) -> bool:
    """Return whether a convolution is of a form that libraries for CPUs have.

    Images have at most two dimensions; groups are of several features, and none of examples, as in
    the gradient of a kernel with groups.
    """
    kernel: Any = eqn.invars[1].aval
    numbers = dimension_numbers(eqn)
    is_depthwise = eqn.params["feature_group_count"] > 1 and kernel.shape[numbers.rhs_spec[1]] == 1
    is_flat = len(numbers.lhs_spec) <= 4
    return is_flat and eqn.params["batch_group_count"] == 1 and not is_depthwise


def operand_axes(eqn: JaxprEqn, operand: int) -> OperandAxes:
    """Return the axes of an operand of a `dot_general`, the first or the second."""
    contracted, batch = (tuple(map(int, each[operand])) for each in dimension_numbers(eqn))
    aval: Any = eqn.invars[operand].aval
    free = tuple(axis for axis in range(aval.ndim) if axis not in (*contracted, *batch))
    return OperandAxes(batch, free, contracted)


def has_batch_axes(eqn: JaxprEqn) -> bool:
    """Return whether this is a `dot_general` with batch axes, as a stack of products has."""
    return eqn.primitive.name == "dot_general" and bool(operand_axes(eqn, 0).batch)


def takes_one_of_each_row(eqn: JaxprEqn) -> bool:
    """Return whether this is a `gather` of one entry of each row, as of a logit by its label."""
    if eqn.primitive.name != "gather":
        return False
    operand: Any = eqn.invars[0].aval
    indices: Any = eqn.invars[1].aval
    rows = dimension_numbers(eqn).operand_batching_dims
    return (
        len(rows) == operand.ndim - 1
        and set(eqn.params["slice_sizes"]) == {1}
        and math.prod(indices.shape[:-1]) == math.prod(operand.shape[axis] for axis in rows)
    )


def reduced_axes(eqn: JaxprEqn) -> tuple[Any, ...]:
    """Return the axes, of its operand or of a mesh, that an equation reduces over, if it does."""
    return tuple(eqn.params.get("axes", ()))


def same_entries(
    before: Sequence[int], after: Sequence[int]
) -> Iterator[tuple[list[tuple[int, int]], list[tuple[int, int]]]]:
    """Yield pairs of runs of axes with the same entries, each axis with its length.

    Axes of length 1 are in none.
    """
    left = [(axis, n) for axis, n in enumerate(before) if n != 1]
    right = [(axis, n) for axis, n in enumerate(after) if n != 1]
    if 0 in (*before, *after):
        return
    while left or right:
        first, second = [left.pop(0)], [right.pop(0)]
        while (a := _product(first)) != (b := _product(second)):
            (first if a < b else second).append((left if a < b else right).pop(0))
        yield first, second


def _product(axes: Sequence[tuple[int, int]]) -> int:
    return math.prod(n for _, n in axes)
