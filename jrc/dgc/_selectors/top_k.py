"""Top-k with a static k: indices of the entries of largest magnitude, exactly or nearly."""

from functools import reduce

import jax.numpy as jnp
from jax import lax

from jrc._typing import Array, Float, Int
from jrc.dgc._selectors.threshold import largest_mask

GROUP = 16
"""Neighbours that compete in the first of two stages."""

SMALL = 1 << 16
"""Up to this size one call of `lax.top_k` is quick enough, and the smallest program."""

RARE = 128
"""Two stages win, measured on CPU, while fewer than one entry in so many is selected."""


def largest(values: Float[Array, " n"], k: int) -> Int[Array, " k"]:
    """Indices of the k entries of largest magnitude; ties go to the lowest index.

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
        # With groups of neighbours, in their order, each group that is left out has k entries
        # before it that are larger, or equal with a lower index: nothing is missed.
        groups = jnp.sort(lax.top_k(group_maxima(values), k)[1])
        return largest_within(values, groups, k)
    # A sort of so many grows with k; counting does not.
    return jnp.nonzero(largest_mask(values, k), size=k)[0].astype(jnp.int32)


def group_maxima(values: Float[Array, " n"]) -> Float[Array, " groups"]:
    """The largest magnitude in each group of `GROUP` neighbours; the last may be short."""
    return maxima_of(values, GROUP)


def maxima_of(values: Float[Array, " n"], each: int) -> Float[Array, " groups"]:
    """The largest magnitude in each group of so many neighbours.

    An unrolled maximum over strided slices, each made positive by itself, is one pass that
    XLA:CPU vectorises: 12 times quicker than a reduction over a short minor axis, or than slices
    of an array of magnitudes, which it writes out first.
    """
    groups = -(-values.size // each)
    slices = [jnp.abs(values[offset::each]) for offset in range(each)]
    # No magnitude is below zero, and no group is empty.
    padded = [jnp.pad(x, (0, groups - x.size)) for x in slices]
    return reduce(jnp.maximum, padded)


def members(groups: Int[Array, " m"], each: int) -> Int[Array, "m each"]:
    """The indices of the entries in some groups of so many neighbours."""
    return groups[:, None] * each + jnp.arange(each, dtype=jnp.int32)[None]


def magnitudes(values: Float[Array, " n"], indices: Array) -> Array:
    """Magnitudes at some indices; places behind the end lose against every one, zero included."""
    found = jnp.abs(values.at[indices].get(mode="fill", fill_value=0.0))
    return jnp.where(indices < values.size, found, -1.0)


def largest_within(values: Float[Array, " n"], groups: Int[Array, " m"], k: int) -> Array:
    candidates = members(groups, GROUP).reshape(-1)
    return candidates[lax.top_k(magnitudes(values, candidates), k)[1]]
