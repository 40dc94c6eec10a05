"""Random bits of a slice: those that all bits have at its positions.

JAX's default generator (Threefry-2x32, Salmon et al., "Parallel Random Numbers: As Easy as 1, 2,
3", SC 2011) draws each number from the key and its position alone, where
`jax_threefry_partitionable` is set.

>>> import jax, jax.numpy as jnp
>>> draw = lambda key: jax.random.bits(key, (6, 4))
>>> (*_, eqn) = jax.make_jaxpr(draw)(jax.random.key(0)).eqns
>>> bits = bits_at(jax.random.key(0), jnp.arange(2, 5, dtype="uint32"), (6, 4), 0, 32)
>>> bool((bits == draw(jax.random.key(0))[2:5]).all())
True
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.extend.random import threefry2x32_p

from jrc._jaxpr.atoms import shape_of

_WORD = 2**32

Words = tuple[Any, Any]
"""The high and the low word of numbers below 2**64."""


def are_drawn_by_position(eqn: JaxprEqn) -> bool:
    """Return whether each of the bits depends on the key and its position alone.

    Bits of a key that varies over manual axes of a mesh count as others: equations for a slice are
    traced without such axes.
    """
    varies = getattr(eqn.invars[0].aval, "manual_axis_type", None)
    is_alike = not getattr(varies, "varying", None)
    return jax.config.jax_threefry_partitionable and is_threefry(eqn) and is_alike


def is_threefry(eqn: JaxprEqn) -> bool:
    """Return whether keys are those of JAX's default generator."""
    return getattr(eqn.invars[0].aval, "dtype", None) == _threefry()


@functools.cache
def _threefry() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype


def bits_of_slice(eqn: JaxprEqn, axis: int, keys: Any, numbers: Any) -> Any:
    """Return the bits of a slice.

    Args:
        eqn: The equation that draws all bits.
        axis: The axis of the slice in the result; not one of several keys.
        keys: The keys.
        numbers: The positions along the axis, unsigned, one axis.
    """
    count = len(shape_of(eqn.invars[0]))
    shape = shape_of(eqn.outvars[0])[count:]
    draw = lambda key: bits_at(key, numbers, shape, axis - count, eqn.params["bit_width"])  # noqa: E731
    for _ in range(count):
        draw = jax.vmap(draw)
    return draw(keys)


def bits_at(key: Any, numbers: Any, shape: Sequence[int], axis: int, width: int) -> Any:
    """Return some of the bits that `jax.random.bits` draws.

    Args:
        key: A typed key of the Threefry generator.
        numbers: The positions along the axis, `uint32[n]`.
        shape: The shape of all bits.
        axis: The axis.
        width: Bits of a number: 8, 16, 32 or 64.

    Returns:
        Unsigned numbers of the shape, but for `n` along the axis.
    """
    high, low = _positions(numbers, shape, axis)
    # All operands must vary over the same axes of a mesh, and be split alike under `jax.vmap`.
    first, second = jax.random.key_data(key)
    nothing = (first ^ first) + (low ^ low)
    words = (word + nothing for word in (first, second, high, low))
    one, other = threefry2x32_p.bind(*words)
    dtype = jnp.dtype(f"uint{width}")
    if width == 64:
        return (one.astype(dtype) << 32) | other.astype(dtype)
    return (one ^ other).astype(dtype)


def _positions(numbers: Any, shape: Sequence[int], axis: int) -> Words:
    """The positions of a slice's entries among all, row by row."""
    made = [*shape[:axis], *numbers.shape, *shape[axis + 1 :]]
    along = [jnp.arange(n, dtype=jnp.uint32) if i != axis else numbers for i, n in enumerate(shape)]
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    spread = lambda x, i: jax.lax.broadcast_in_dim(x, made, (i,))  # noqa: E731
    if math.prod(shape) <= _WORD:
        terms = (x * jnp.uint32(n % _WORD) for x, n in zip(along, strides, strict=True))
        return jnp.uint32(0), sum(spread(x, i) for i, x in enumerate(terms))
    found: Words = (jnp.uint32(0), jnp.uint32(0))
    for i, (x, n) in enumerate(zip(along, strides, strict=True)):
        high, low = _product(x, n)
        found = _sum(found, (spread(high, i), spread(low, i)))
    return found


def _product(x: Any, number: int) -> Words:
    """The product of 32-bit numbers and a number below 2**64, modulo 2**64."""
    above, below = divmod(number, _WORD)
    (a, b), (c, d) = (x >> 16, x & 0xFFFF), divmod(below, 2**16)
    a, b = (each.astype(jnp.uint32) for each in (a, b))
    c, d = jnp.uint32(c), jnp.uint32(d)
    middle = (b * d >> 16) + (a * d & 0xFFFF) + (b * c & 0xFFFF)
    carried = a * c + (a * d >> 16) + (b * c >> 16) + (middle >> 16)
    return carried + x * jnp.uint32(above), x * jnp.uint32(below)


def _sum(one: Words, other: Words) -> Words:
    low = one[1] + other[1]
    return one[0] + other[0] + (low < other[1]).astype(jnp.uint32), low
