"""The wire format `"f32"`."""

import dataclasses

import jax.numpy as jnp

from jrc._bits import as_bits
from jrc.dgc._entries import Entries
from jrc.dgc._wires.packing import Words


@dataclasses.dataclass(frozen=True)
class Float32:
    """A float32 value and its position: 8 bytes an entry, no rounding."""

    def words(self, entries: int, blocks: int) -> int:
        """Return the number of 32-bit words that `entries` entries take."""
        del blocks
        return 2 * entries

    def ordered(self, entries: Entries) -> Entries:
        """Return the entries as they are: this format keeps any order."""
        return entries

    def encode(self, entries: Entries, blocks: int) -> Words:
        """Return the words for some entries."""
        del blocks
        return jnp.concatenate([as_bits(entries.values, jnp.uint32), entries.positions])

    def decode(self, words: Words, count: int, blocks: int) -> Entries:
        """Return the entries behind some words, in the order of `encode`."""
        del blocks
        return Entries(as_bits(words[:count], jnp.float32), words[count:])
