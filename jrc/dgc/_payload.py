"""What crosses the wire: the entries of all tensors, packed into one buffer of words."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jrc._typing import Array, Float, Int


class Entries(NamedTuple):
    """Selected entries of one tensor: `values: float32[k]` at unique `indices: int32[k]`."""

    values: Float[Array, " k"]
    indices: Int[Array, " k"]


def pack(entries: Sequence[Entries]) -> Int[Array, " words"]:
    """One buffer of all entries: first the values' bits, then the indices.

    Args:
        entries: Those of each tensor.

    Returns:
        Uint32 words, two for each entry.
    """
    values = jnp.concatenate([each.values for each in entries])
    indices = jnp.concatenate([each.indices for each in entries])
    words = [lax.bitcast_convert_type(part, jnp.uint32) for part in (values, indices)]
    return jnp.concatenate(words)


def unpack(words: Int[Array, " words"], counts: Sequence[int]) -> list[Entries]:
    """The entries of each tensor, from one replica's buffer.

    Args:
        words: uint32, as packed.
        counts: Entries of each tensor.

    Returns:
        The same entries, bit by bit.
    """
    half = words.size // 2
    values = lax.bitcast_convert_type(words[:half], jnp.float32)
    indices = lax.bitcast_convert_type(words[half:], jnp.int32)
    found, start = [], 0
    for count in counts:
        stop = start + count
        found.append(Entries(values[start:stop], indices[start:stop]))
        start = stop
    return found
