"""The wire format `"bf16"`."""

import dataclasses

import jax.numpy as jnp

from jrc._bits import as_bits
from jrc.dgc._entries import BLOCK, BLOCK_BITS, Entries
from jrc.dgc._wires.packing import Words, addresses, by_position, finite, positions_of


@dataclasses.dataclass(frozen=True)
class BFloat16:
    """A bfloat16 value and its offset in its block in one word: 4 bytes an entry, 4 a block."""

    def words(self, entries: int, blocks: int) -> int:
        """Return the number of 32-bit words that `entries` entries take."""
        return blocks + entries

    def ordered(self, entries: Entries) -> Entries:
        """Return the entries sorted by position, as `encode` needs them."""
        return by_position(entries)

    def encode(self, entries: Entries, blocks: int) -> Words:
        """Return the words for entries that are sorted by position."""
        ends, offsets = addresses(entries.positions, blocks)
        bits = as_bits(finite(entries.values).astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32)
        return jnp.concatenate([ends, bits << BLOCK_BITS | offsets])

    def decode(self, words: Words, count: int, blocks: int) -> Entries:
        """Return the entries behind some words, in the order of `encode`."""
        ends, both = words[:blocks], words[blocks:]
        bits = (both >> BLOCK_BITS).astype(jnp.uint16)
        values = as_bits(bits, jnp.bfloat16).astype(jnp.float32)
        return Entries(values, positions_of(ends, both & (BLOCK - 1)))
