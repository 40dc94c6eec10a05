"""Top-k with a static k: indices of the entries of largest magnitude, exactly or nearly."""

from functools import reduce

import jax.numpy as jnp
from jax import lax

from jrc._typing import Array, Float, Int
from jrc.dgc._selectors.threshold import largest_mask, sample_of

GROUP = 16
"""Neighbours that compete in the first of two stages."""

SMALL = 1 << 16
"""Up to this size one call of `lax.top_k` is quick enough, and the smallest program."""

RARE = 128
"""Two stages win, measured on CPU, while fewer than one entry in so many is selected."""

HITS = 32
"""Of the k largest, so many at least should be in a sample: fewer say little about the k-th."""


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
        return _largest_within(values, groups, k)
    # A sort of so many grows with k; counting does not.
    return jnp.nonzero(largest_mask(values, k), size=k)[0].astype(jnp.int32)


def largest_of_maxima(values: Float[Array, " n"], k: int, blocks: int) -> Int[Array, " k"]:
    """The largest entry of each of the k blocks whose largest entries are largest.

    Args:
        values: float32.
        k: Entries to select, in [1, n]; static.
        blocks: Blocks for each entry that is selected, at least.

    Returns:
        Unique int32 indices, in no promised order; exactly the largest where a block would be a
        group of `GROUP` entries or less.
    """
    n = values.size
    groups = -(-n // GROUP)
    # No more than a group has neighbours, or the maximum would unroll into a long program.
    each = min(groups // (k * blocks), GROUP)
    if n <= SMALL or each < 2:
        return largest(values, k)
    maxima = group_maxima(values)
    block = lax.top_k(_maxima_of(maxima, each), k)[1]
    group = _first_largest(maxima, block, each)
    return _first_largest(values, group, GROUP)


def largest_sampled(values: Float[Array, " n"], k: int, share: float) -> Int[Array, " k"]:
    """About the k largest entries: those that exceed a threshold taken from a sample.

    Groups of `GROUP` neighbours whose maximum reaches the threshold are looked through, 2k of them
    at most; where fewer than k reach it, others fill up.

    Args:
        values: float32.
        k: Entries to select, in [1, n]; static.
        share: Of the entries, that are sampled; more where k is small.

    Returns:
        Unique int32 indices, in no promised order.

    Source: Lin et al., "Deep Gradient Compression", arXiv:1712.01887, section 5 (hierarchical
    threshold selection).
    """
    n = values.size
    if n <= SMALL or k * RARE > n:
        return largest(values, k)
    sample = jnp.abs(sample_of(values, max(1, min(int(1 / share), k // HITS))))
    # A little below k, so that the threshold is seldom too high.
    reached = lax.top_k(sample, max(1, min(sample.size, int(1.25 * k * sample.size / n) + 1)))[0]
    # Where most entries are zero, so may be the threshold, which every one would reach.
    maxima = group_maxima(values)
    above = (maxima >= reached[-1]) & (maxima > 0)
    size = min(above.size, 2 * k)
    yes = jnp.nonzero(above, size=size)[0]
    no = jnp.nonzero(~above, size=size)[0]
    place = jnp.arange(size, dtype=jnp.int32)
    count = jnp.sum(above, dtype=jnp.int32)
    groups = jnp.where(place < count, yes, no[jnp.maximum(place - count, 0)])
    return _largest_within(values, groups.astype(jnp.int32), k)


def group_maxima(values: Float[Array, " n"]) -> Float[Array, " groups"]:
    """The largest magnitude in each group of `GROUP` neighbours; the last may be short."""
    return _maxima_of(values, GROUP)


def _maxima_of(values: Float[Array, " n"], each: int) -> Float[Array, " groups"]:
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


def _largest_within(values: Float[Array, " n"], groups: Int[Array, " m"], k: int) -> Array:
    candidates = members(groups, GROUP).reshape(-1)
    return candidates[lax.top_k(magnitudes(values, candidates), k)[1]]


def _first_largest(values: Float[Array, " n"], groups: Int[Array, " m"], each: int) -> Array:
    """The index of the largest entry of each of some groups."""
    candidates = members(groups, each)
    best = jnp.argmax(magnitudes(values, candidates), axis=1, keepdims=True)
    return jnp.take_along_axis(candidates, best, axis=1)[:, 0]
