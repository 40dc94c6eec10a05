"""Exact top-k with a static k: the indices of the entries of largest magnitude."""

from functools import reduce

import jax.numpy as jnp
from jax import lax

from jrc._typing import Array, Float, Int
from jrc.dgc._threshold import largest_mask

BLOCK = 16
"""Entries that compete in the first of the two stages."""

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
        return _largest_in_two_stages(values, k)
    # A sort of so many grows with k; counting does not.
    return jnp.nonzero(largest_mask(values, k), size=k)[0].astype(jnp.int32)


def _largest_in_two_stages(values: Float[Array, " n"], k: int) -> Int[Array, " k"]:
    """The k largest entries, looked for in the k blocks with the largest maxima only.

    With contiguous blocks, in their order, each block that is left out has k entries before it
    that are larger, or equal with a lower index: nothing is missed, ties included.

    Args:
        values: float32.
        k: Entries to select, at most the number of blocks; static.

    Returns:
        Unique int32 indices.
    """
    blocks = jnp.sort(lax.top_k(_block_maxima(values), k)[1])
    candidates = (blocks[:, None] * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)[None]).reshape(-1)
    found = jnp.abs(values.at[candidates].get(mode="fill", fill_value=0.0, indices_are_sorted=True))
    # Places behind the end lose against every magnitude, zero included.
    found = jnp.where(candidates < values.size, found, -1.0)
    return candidates[lax.top_k(found, k)[1]]


def _block_maxima(values: Float[Array, " n"]) -> Float[Array, " blocks"]:
    """The largest magnitude in each block of `BLOCK` neighbours; the last block may be short.

    An unrolled maximum over strided slices, each made positive by itself, is one pass that
    XLA:CPU vectorises: 12 times quicker than a reduction over a short minor axis, or than slices
    of an array of magnitudes, which it writes out first.
    """
    blocks = -(-values.size // BLOCK)
    slices = [jnp.abs(values[offset::BLOCK]) for offset in range(BLOCK)]
    # No magnitude is below zero, and no block is empty.
    padded = [jnp.pad(x, (0, blocks - x.size)) for x in slices]
    return reduce(jnp.maximum, padded)
