"""Bits of arrays, and small integers packed into 32-bit words.

>>> words = packed(jnp.arange(16, dtype=jnp.uint32), 12)
>>> words.size, unpacked(words, 12, 16).tolist() == list(range(16))
(6, True)
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrc._typing import Array, UInt


def as_bits(x: Array | np.ndarray, dtype: jax.typing.DTypeLike) -> Array:
    """Return the same bits as another dtype."""
    return lax.bitcast_convert_type(x, dtype)


def words_for(count: int, bits: int) -> int:
    """Return the words that `count` integers take, in whole groups: 8 of 12 bits fill 3 words.

    >>> words_for(9, 12), words_for(9, 2)
    (6, 1)
    """
    together, words = _group(bits)
    return -(-count // together) * words


def packed(values: UInt[Array, " n"], bits: int) -> UInt[Array, " words"]:
    """Pack integers one after another, the first in the lowest bits of the first word.

    Args:
        values: Unsigned integers, each below 2**bits.
        bits: From 1 to 32.

    Returns:
        uint32 words, `words_for(n, bits)`; the last group is filled with zeros.
    """
    together, words = _group(bits)
    padded = jnp.pad(values, (0, -values.size % together))
    columns = padded.astype(jnp.uint32).reshape(-1, together).T
    out = [jnp.zeros(columns.shape[1:], jnp.uint32) for _ in range(words)]
    for i, column in enumerate(columns):
        word, shift = divmod(i * bits, 32)
        out[word] |= column << shift
        if shift + bits > 32:
            out[word + 1] |= column >> (32 - shift)
    return jnp.stack(out, axis=1).reshape(-1)


def unpacked(words: UInt[Array, " words"], bits: int, count: int) -> UInt[Array, " n"]:
    """Return the first `count` integers of some words as uint32, as `packed` wrote them."""
    together, each = _group(bits)
    columns = words.reshape(-1, each).T
    mask = jnp.uint32(2**bits - 1)
    out = []
    for i in range(together):
        word, shift = divmod(i * bits, 32)
        value = columns[word] >> shift
        if shift + bits > 32:
            value |= columns[word + 1] << (32 - shift)
        out.append(value & mask)
    return jnp.stack(out, axis=1).reshape(-1)[:count]


def _group(bits: int) -> tuple[int, int]:
    """Return how many integers fill how many words without a rest."""
    common = math.gcd(bits, 32)
    return 32 // common, bits // common
