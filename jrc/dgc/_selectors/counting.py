"""Exact top-k by counting, for accelerators: neither a sort nor a scatter.

The k-th largest integer is found digit by digit: each pass counts how many reach each of fifteen
thresholds. Which of those that tie with it are taken, the first, is found in the same way. So there
is a mask with k entries, and the place of the j-th is looked up in a tree of counts.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from jrc._typing import Array, Int, Shaped
from jrc.dgc._selectors.threshold import MAGNITUDE_BITS

DIGIT_BITS = 4

BRANCHES = 128
"""Counts of a node of the tree."""

AT_ONCE = 4096
"""Counts that are searched without a tree."""

Segments = Int[Array, "segments n"]
"""int32, a segment in each row; integers below zero are left out."""


def kth_largest_each(
    x: Segments, counts: Int[Array, " segments"], bits: int = MAGNITUDE_BITS
) -> Int[Array, " segments"]:
    """Return for each segment the largest t >= 0 that at least k of its integers reach.

    Args:
        x: The segments.
        counts: For each k in [1, the number of its integers from 0 on].
        bits: Bits of the largest integer.

    Returns:
        The k-th largest integer of each segment.
    """
    passes = -(-bits // DIGIT_BITS)
    digits = jnp.arange(1, 1 << DIGIT_BITS, dtype=jnp.int32)[None]

    def settle(step: Array, found: Array) -> Array:
        shift = DIGIT_BITS * (passes - 1 - step)
        tried = found[:, None] | (digits << shift)
        reached = jnp.sum(x[:, None] >= tried[:, :, None], axis=2, dtype=jnp.int32)
        # The highest digit may reach into the sign.
        passed = (reached >= counts[:, None]) & (tried > 0)
        return found | (jnp.sum(passed, axis=1, dtype=jnp.int32) << shift)

    # The carry takes its type, varying or not, from the data.
    return lax.fori_loop(0, passes, settle, jnp.zeros_like(x, shape=x.shape[:1]))


def largest_each(x: Segments, counts: Sequence[int]) -> Shaped[Array, "segments n"]:
    """Return a mask of the k largest integers of each segment; ties go to the first.

    Args:
        x: The segments.
        counts: For each k in [1, the number of its integers from 0 on].

    Returns:
        Booleans, exactly k of each segment set.
    """
    wanted, n = jnp.asarray(counts, jnp.int32), x.shape[1]
    t = kth_largest_each(x, wanted)[:, None]
    above = x > t
    # Numbered from the end, so that the first of those that tie are the largest.
    tied = jnp.where(x == t, n - 1 - lax.broadcasted_iota(jnp.int32, x.shape, 1), -1)
    missing = wanted - jnp.sum(above, axis=1, dtype=jnp.int32)
    last = kth_largest_each(tied, missing, max(1, (n - 1).bit_length()))
    return above | (tied >= last[:, None])


def places_of(counts: Shaped[Array, " n"], k: int, most: int | None = None) -> Int[Array, " k"]:
    """Return where each of k things lies, of which `counts[i]` lie at place i.

    Args:
        counts: Integers, at least k in all; or booleans, to get the places of a mask's entries.
        k: Static.
        most: So many are looked up at a time, each in 128 counts; `None` for all.

    Returns:
        int32 places, ascending.

    >>> places_of(jnp.array([0, 1, 0, 2]), 3).tolist()
    [1, 3, 3]
    """
    tree = _tree(counts)
    if most is None or k <= most:
        return _search(tree, jnp.arange(k, dtype=jnp.int32))[0]
    # Those behind the last are looked up as the last.
    ranks = jnp.minimum(jnp.arange(-(-k // most) * most, dtype=jnp.int32), k - 1)
    found = lax.map(lambda some: _search(tree, some)[0], ranks.reshape(-1, most))
    return found.reshape(-1)[:k]


def _tree(counts: Array) -> list[Array]:
    """Return the counts in nodes, the sums of these, and so on; the last are few, and summed up."""
    if counts.size <= AT_ONCE:
        return [jnp.cumsum(counts, dtype=jnp.int32)[None]]
    nodes = jnp.pad(counts, (0, -counts.size % BRANCHES)).reshape(-1, BRANCHES)
    return [nodes, *_tree(jnp.sum(nodes, axis=1, dtype=jnp.int32))]


def _search(tree: Sequence[Array], ranks: Int[Array, " k"]) -> tuple[Array, Array]:
    """Return the place of each rank, and how many lie before that place."""
    nodes, *above = tree
    if not above:
        return _within(nodes, ranks)
    node, before = _search(above, ranks)
    ends = jnp.cumsum(nodes[node], axis=1, dtype=jnp.int32) + before[:, None]
    branch, within = _within(ends, ranks)
    return node * BRANCHES + branch, jnp.maximum(before, within)


def _within(ends: Int[Array, "_m n"], ranks: Int[Array, " k"]) -> tuple[Array, Array]:
    """Return the first place whose count ends behind each rank, and where the one before ends."""
    passed = ends <= ranks[:, None]
    place = jnp.sum(passed, axis=1, dtype=jnp.int32)
    return place, jnp.max(jnp.where(passed, ends, 0), axis=1)
