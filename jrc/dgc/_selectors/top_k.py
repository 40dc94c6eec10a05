"""Exact top-k with a static k, and the maxima of groups from which every selector starts."""

from functools import reduce

import jax.numpy as jnp
from jax import lax

from jrc._typing import Array, Float, Int
from jrc.dgc._selectors.threshold import largest_mask

GROUP = 16
"""Neighbouring entries in a group, of which the first of two stages takes the maximum."""

SMALL = 1 << 16
"""Entries up to which one call of `lax.top_k` is used: fast enough, and the smallest program."""

RARE = 128
"""Two stages are faster, measured on CPU, if at most one entry in so many is selected."""


def largest(values: Float[Array, " n"], k: int) -> Int[Array, " k"]:
    """Return the indices of the k entries of largest magnitude; ties go to the lowest index.

    Args:
        values: float32, finite or infinite.
        k: Entries to select, in [1, n]; static.

    Returns:
        Unique int32 indices in [0, n), in no promised order.

    >>> sorted(largest(jnp.array([1.0, -3.0, 2.0, 3.0]), 2).tolist())
    [1, 3]
    """
    n = values.size
    if k == n:
        return jnp.arange(n, dtype=jnp.int32)
    if n <= SMALL:
        return lax.top_k(jnp.abs(values), k)[1]
    if k * RARE <= n:
        # Each group that is left out has k groups before it with a larger maximum, or an equal one
        # and lower indices, so none of the k largest entries lies in it.
        groups = jnp.sort(lax.top_k(group_maxima(values), k)[1])
        return largest_within(values, groups, k)
    # The time of a sort grows with k, that of counting does not.
    return jnp.nonzero(largest_mask(values, k), size=k)[0].astype(jnp.int32)


def group_maxima(values: Float[Array, " n"]) -> Float[Array, " groups"]:
    """Return the largest magnitude in each group of `GROUP` entries; the last may be short."""
    return maxima_of(values, GROUP)


def maxima_of(values: Float[Array, " n"], each: int) -> Float[Array, " groups"]:
    """Return the largest magnitude in each group of `each` entries.

    An unrolled maximum over strided slices, each made positive by itself, is one pass that
    XLA:CPU vectorises: 12 times faster than a reduction over a short minor axis, or than slices
    of an array of magnitudes, which it writes out first.
    """
    groups = -(-values.size // each)
    slices = [jnp.abs(values[offset::each]) for offset in range(each)]
    # Padding with zero is safe: no magnitude is below zero, and no group is empty.
    padded = [jnp.pad(x, (0, groups - x.size)) for x in slices]
    return reduce(jnp.maximum, padded)


def members(groups: Int[Array, " m"], each: int) -> Int[Array, "m each"]:
    """Return the indices of the entries in some groups of `each` entries."""
    return groups[:, None] * each + jnp.arange(each, dtype=jnp.int32)[None]


def magnitudes(values: Float[Array, " n"], indices: Array) -> Array:
    """Return magnitudes at some indices, -1 behind the end, which is below every magnitude."""
    found = jnp.abs(values.at[indices].get(mode="fill", fill_value=0.0))
    return jnp.where(indices < values.size, found, -1.0)


def largest_within(values: Float[Array, " n"], groups: Int[Array, " m"], k: int) -> Array:
    candidates = members(groups, GROUP).reshape(-1)
    return candidates[lax.top_k(magnitudes(values, candidates), k)[1]]
