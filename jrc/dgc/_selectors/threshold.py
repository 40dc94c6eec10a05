"""The k largest for a traced k: the k-th largest magnitude by bisection, without a sort."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from jrc._typing import Array, Count, Float, Int
from jrc.dgc._entries import fits

MAGNITUDE_BITS = 31
"""Bits of a float32 without its sign: their order is the order of magnitudes."""

SAMPLE = 1 << 16
"""Entries of a sample. A leaf with twice as many gets its threshold from a sample."""


def magnitude_bits(values: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Return integers in the order of `|values|`; infinity is the largest number."""
    return lax.bitcast_convert_type(jnp.abs(values), jnp.int32)


def kth_largest(
    rows: Sequence[Int[Array, " _n"]], counts: Int[Array, " rows"]
) -> Int[Array, " rows"]:
    """Return for each row the largest t that at least `count` of its integers are >= t.

    Found bit by bit in 31 counting passes over all rows, in one loop. Rows of similar length are
    counted together, because XLA would compile a kernel for each.

    Args:
        rows: Non-negative int32, of any lengths.
        counts: For each row k in [1, n]; may be traced.

    Returns:
        The k-th largest integer of each row.
    """
    groups: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row.size.bit_length(), []).append(i)
    blocks = [_side_by_side([rows[i] for i in group]) for group in groups.values()]
    order = np.concatenate(list(groups.values()))
    ends = np.cumsum([len(group) for group in groups.values()])[:-1]
    wanted = counts[order]

    def settle(step: Count, found: Array) -> Array:
        tried = found | (jnp.int32(1) << (MAGNITUDE_BITS - 1 - step))
        parts = jnp.split(tried, ends)
        reached = [_how_many(b >= t[:, None]) for b, t in zip(blocks, parts, strict=True)]
        return jnp.where(jnp.concatenate(reached) >= wanted, tried, found)

    # The carry takes its type, varying or not, from the data.
    zeros = jnp.concatenate([jnp.zeros_like(block, shape=block.shape[:1]) for block in blocks])
    return lax.fori_loop(0, MAGNITUDE_BITS, settle, zeros)[np.argsort(order)]


def _side_by_side(rows: Sequence[Int[Array, " _n"]]) -> Int[Array, "rows n"]:
    """Return the rows as one array, short ones filled up with -1, below every threshold."""
    width = max(row.size for row in rows)
    return jnp.stack([jnp.pad(row, (0, width - row.size), constant_values=-1) for row in rows])


def _how_many(mask: Array) -> Int[Array, " rows"]:
    """Return the number of true entries of each row, counted in float32 where that is exact.

    A sum of float32 compiles faster.
    """
    if mask.shape[1] < 2**24:
        return jnp.sum(mask.astype(jnp.float32), axis=1).astype(jnp.int32)
    return jnp.sum(mask, axis=1, dtype=jnp.int32)


def sample_of(values: Float[Array, " n"], stride: int) -> Float[Array, " m"]:
    """Return one entry of each group of `stride` neighbours, at a pseudo-random place in the group.

    A constant place would sample few of the columns of a matrix, and columns differ.

    Args:
        values: Of any length from 1 on.
        stride: Entries of a group; static.

    Returns:
        `ceil(n / stride)` entries in their order; all of them where the stride is 1. Of 2**31
        entries or more `floor(n / stride)`.
    """
    if stride == 1:
        return values
    fitting = fits(values.size)
    count = -(-values.size // stride) if fitting else values.size // stride
    groups = jnp.arange(count, dtype=jnp.uint32)
    # A multiplicative hash (Knuth, The Art of Computer Programming, volume 3, section 6.4).
    turn = (groups * np.uint32(2654435761) >> 16) % np.uint32(stride)
    if not fitting:
        # No int32 indexes the flat array; the last, short group is left out.
        rows = values[: count * stride].reshape(count, stride)
        return jnp.take_along_axis(rows, turn[:, None].astype(jnp.int32), axis=1)[:, 0]
    return values[jnp.minimum(groups * np.uint32(stride) + turn, np.uint32(values.size - 1))]


def largest_masks(
    values: Sequence[Float[Array, "..."]], counts: Int[Array, " leaves"]
) -> list[Array]:
    """Return masks of the largest entries of each leaf, all that tie with the last one included.

    Exact for leaves of fewer than twice `SAMPLE` entries. For a larger one the threshold comes from
    a sample, and the number of entries is k up to a relative error of about
    `1 / sqrt(k * SAMPLE / n)`.

    Args:
        values: float32, one for each leaf, of any shape.
        counts: int32, k in [1, n] for each leaf; may be traced.

    Returns:
        A boolean array like each leaf.
    """
    strides = [max(1, x.size // SAMPLE) for x in values]
    samples = [
        magnitude_bits(sample_of(x.reshape(-1), stride))
        for x, stride in zip(values, strides, strict=True)
    ]
    shares = np.asarray([s.size / x.size for s, x in zip(samples, values, strict=True)], np.float32)
    sampled = jnp.ceil(counts.astype(jnp.float32) * shares).astype(jnp.int32)
    # Without a sample the counts are those that were given, which float32 might round.
    wanted = jnp.where(np.asarray(strides) == 1, counts, jnp.maximum(sampled, 1))
    found = kth_largest(samples, wanted)
    return [magnitude_bits(x) >= found[i] for i, x in enumerate(values)]


def largest_mask(values: Float[Array, " n"], count: int | Count) -> Array:
    """Return a mask of the `count` entries of largest magnitude; ties go to the lowest index.

    Args:
        values: float32.
        count: k in [1, n]; may be traced.

    Returns:
        A boolean array with exactly `count` entries set.

    >>> largest_mask(jnp.array([1.0, -3.0, 2.0, 3.0]), 2).tolist()
    [False, True, False, True]
    """
    bits = magnitude_bits(values)
    (threshold,) = kth_largest([bits], jnp.asarray([count], jnp.int32))
    above = bits > threshold
    tied = bits == threshold
    missing = count - jnp.sum(above, dtype=jnp.int32)
    return above | (tied & (jnp.cumsum(tied, dtype=jnp.int32) <= missing))
