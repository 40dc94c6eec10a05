"""Exact top-k with a traced k: the k-th largest magnitude by bisection, and no sort."""

import jax.numpy as jnp
from jax import lax

from jrc._typing import Array, Count, Float, Int

MAGNITUDE_BITS = 31
"""Bits of a float32 without its sign: their order is the order of magnitudes."""


def magnitude_bits(values: Float[Array, " n"]) -> Int[Array, " n"]:
    """Integers in the order of `|values|`; infinity is the largest number."""
    return lax.bitcast_convert_type(jnp.abs(values), jnp.int32)


def kth_largest(bits: Int[Array, " n"], count: Count) -> Count:
    """The largest t that at least `count` of the integers reach, found bit by bit.

    Args:
        bits: Non-negative int32.
        count: k in [1, n]; may be traced.

    Returns:
        The k-th largest integer.
    """

    def settle(step: Count, threshold: Count) -> Count:
        tried = threshold | (jnp.int32(1) << (MAGNITUDE_BITS - 1 - step))
        reached = jnp.sum(bits >= tried, dtype=jnp.int32)
        return jnp.where(reached >= count, tried, threshold)

    # The carry takes its type, varying or not, from the data.
    zero = jnp.zeros_like(bits, shape=())
    return lax.fori_loop(0, MAGNITUDE_BITS, settle, zero)


def largest_mask(values: Float[Array, " n"], count: int | Count) -> Array:
    """Where the `count` entries of largest magnitude are; ties go to the lowest index.

    31 counting passes over the data, whatever the count.

    Args:
        values: float32.
        count: k in [1, n]; may be traced.

    Returns:
        A boolean array with exactly `count` entries set.

    >>> largest_mask(jnp.array([1.0, -3.0, 2.0, 3.0]), 2).tolist()
    [False, True, False, True]
    """
    bits = magnitude_bits(values)
    threshold = kth_largest(bits, jnp.asarray(count, jnp.int32))
    above = bits > threshold
    tied = bits == threshold
    room = count - jnp.sum(above, dtype=jnp.int32)
    return above | (tied & (jnp.cumsum(tied, dtype=jnp.int32) <= room))
