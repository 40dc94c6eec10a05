"""Positions as offsets in blocks, of which the short wire formats are built.

The short formats write the offset of an entry within its block of 65,536 positions in 16 bits. One
word for each block says where its entries end.
"""

import jax.numpy as jnp
from jax import lax

from jrc._typing import Array, Float, UInt
from jrc.dgc._entries import BLOCK, BLOCK_BITS, Entries

Words = UInt[Array, " words"]
"""uint32."""


def finite(values: Float[Array, " k"]) -> Float[Array, " k"]:
    """Return values clipped to the range of a short format; error feedback keeps the rest."""
    most = float(jnp.finfo(jnp.bfloat16).max)
    return jnp.clip(values, -most, most)


def by_position(entries: Entries) -> Entries:
    """Return the entries sorted by position."""
    positions, values = lax.sort((entries.positions, entries.values), num_keys=1)
    return Entries(values, positions)


def addresses(
    positions: UInt[Array, " k"], blocks: int
) -> tuple[UInt[Array, " blocks"], UInt[Array, " k"]]:
    """Return where each block's entries end among sorted positions, and offsets in the blocks."""
    firsts = jnp.arange(1, blocks + 1, dtype=jnp.uint32)
    ends = jnp.searchsorted(positions >> BLOCK_BITS, firsts, side="left")
    return ends.astype(jnp.uint32), positions & (BLOCK - 1)


def block_of(ends: UInt[Array, " blocks"], count: int) -> UInt[Array, " k"]:
    """Return the block of each entry, behind the last block for entries of no leaf."""
    places = jnp.arange(count, dtype=jnp.uint32)
    return jnp.searchsorted(ends, places, side="right").astype(jnp.uint32)


def positions_of(ends: UInt[Array, " blocks"], offsets: UInt[Array, " k"]) -> UInt[Array, " k"]:
    """Return positions from where the blocks end and from the offsets in them."""
    return block_of(ends, offsets.size) << BLOCK_BITS | offsets
