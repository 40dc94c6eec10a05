"""Exact top-k by counting, for accelerators: neither a sort nor a scatter.

The k-th largest integer is found digit by digit: each pass counts how many reach each of fifteen
thresholds. Which of those that tie with it are taken, the first, is found in the same way. So there
is a mask with k entries, and the place of the j-th is looked up in a tree of counts.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from jrc._typing import Array, Int
from jrc.dgc._selectors.threshold import MAGNITUDE_BITS

DIGIT_BITS = 4

BRANCHES = 128
"""Counts of a node of the tree."""

AT_ONCE = 4096
"""Counts that are searched without a tree."""

Segments = Int[Array, "_s _n"]
"""int32, a segment in each row; integers below zero are left out."""


def kth_largest_each(
    parts: Sequence[Segments], counts: Sequence[Int[Array, " _s"]], bits: int = MAGNITUDE_BITS
) -> list[Int[Array, " _s"]]:
    """Return for each segment the largest t >= 0 that at least k of its integers reach.

    Args:
        parts: Of any shapes; all are counted in one loop.
        counts: For each segment k in [1, the number of its integers from 0 on].
        bits: Bits of the largest integer.

    Returns:
        The k-th largest integer of each segment.
    """
    passes = -(-bits // DIGIT_BITS)
    digits = jnp.arange(1, 1 << DIGIT_BITS, dtype=jnp.int32)

    def settle(step: Array, found: list[Array]) -> list[Array]:
        shift = DIGIT_BITS * (passes - 1 - step)
        steps = (digits << shift)[None]
        return [
            t | (_digit(x, t[:, None] | steps, k) << shift)
            for x, t, k in zip(parts, found, counts, strict=True)
        ]

    # The carry takes its type, varying or not, from the data.
    start = [jnp.zeros_like(x, shape=x.shape[:1]) for x in parts]
    return lax.fori_loop(0, passes, settle, start)


def _digit(x: Segments, tried: Int[Array, "_s _d"], count: Int[Array, " _s"]) -> Array:
    """Return how many of the thresholds are reached often enough, for each segment."""
    reached = jnp.sum(x[:, None] >= tried[:, :, None], axis=2, dtype=jnp.int32)
    # The highest digit may reach into the sign.
    passed = (reached >= count[:, None]) & (tried > 0)
    return jnp.sum(passed, axis=1, dtype=jnp.int32)


def largest_each(parts: Sequence[Segments], counts: Sequence[np.ndarray]) -> list[Array]:
    """Return masks of the k largest integers of each segment; ties go to the first.

    Args:
        parts: Of any shapes.
        counts: int32, k of each segment, in [1, the number of its integers from 0 on].

    Returns:
        Booleans of the same shapes, with exactly k entries of each segment set.
    """
    ts = kth_largest_each(parts, [jnp.asarray(each, jnp.int32) for each in counts])
    above = [x > t[:, None] for x, t in zip(parts, ts, strict=True)]
    missing = [
        np.asarray(k, np.int32) - jnp.sum(mask, axis=1, dtype=jnp.int32)
        for k, mask in zip(counts, above, strict=True)
    ]
    # Numbered from the end, so that the first of those that tie are the largest.
    tied = [
        jnp.where(x == t[:, None], x.shape[1] - 1 - lax.broadcasted_iota(jnp.int32, x.shape, 1), -1)
        for x, t in zip(parts, ts, strict=True)
    ]
    bits = max(x.shape[1].bit_length() for x in parts)
    lasts = kth_largest_each(tied, missing, bits)
    return [
        mask | (place >= last[:, None])
        for mask, place, last in zip(above, tied, lasts, strict=True)
    ]


def places_of(counts: Int[Array, " n"], k: int) -> Int[Array, " k"]:
    """Return where each of k things lies, of which `counts[i]` lie at place i.

    Args:
        counts: At least k in all. A mask gives the places of its entries.
        k: Static.

    Returns:
        int32 places, ascending.

    >>> places_of(jnp.array([0, 1, 0, 2]), 3).tolist()
    [1, 3, 3]
    """
    return _search(counts, jnp.arange(k, dtype=jnp.int32))[0]


def _search(counts: Array, ranks: Int[Array, " k"]) -> tuple[Array, Array]:
    """Return the place of each rank, and how many lie before that place."""
    if counts.size <= AT_ONCE:
        return _within(jnp.cumsum(counts, dtype=jnp.int32)[None], ranks)
    nodes = jnp.pad(counts, (0, -counts.size % BRANCHES)).reshape(-1, BRANCHES)
    node, before = _search(jnp.sum(nodes, axis=1, dtype=jnp.int32), ranks)
    ends = jnp.cumsum(nodes[node], axis=1, dtype=jnp.int32) + before[:, None]
    branch, within = _within(ends, ranks)
    return node * BRANCHES + branch, jnp.maximum(before, within)


def _within(ends: Int[Array, "_m n"], ranks: Int[Array, " k"]) -> tuple[Array, Array]:
    """Return the first place whose count ends behind each rank, and where the one before ends."""
    passed = ends <= ranks[:, None]
    place = jnp.sum(passed, axis=1, dtype=jnp.int32)
    return place, jnp.max(jnp.where(passed, ends, 0), axis=1)
