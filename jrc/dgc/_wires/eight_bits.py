"""The wire formats `"fp8"` and `"int8"`."""

import dataclasses

import jax.numpy as jnp

from jrc._bits import as_bits, packed, unpacked, words_for
from jrc._errors import public
from jrc._validate import one_of
from jrc.dgc._entries import Entries
from jrc.dgc._wires.packing import (
    Words,
    addresses,
    block_of,
    by_position,
    finite,
    positions_of,
)

KINDS = ("fp8", "int8")


@dataclasses.dataclass(frozen=True)
class EightBits:
    """A byte for the value, two for its offset: 3 bytes an entry, 8 a block.

    Attributes:
        kind: `"fp8"` (4 bits of exponent, 3 of mantissa) or `"int8"`, times the block's scale: the
            largest magnitude in a block is exact, but for the rounding of the scale.
    """

    kind: str

    @public("jrc.dgc.EightBits")
    def __post_init__(self) -> None:
        """Check the kind."""
        one_of(self.kind, "kind", KINDS)

    @property
    def most(self) -> float:
        """The largest number that a byte holds."""
        return 448.0 if self.kind == "fp8" else 127.0

    def words(self, entries: int, blocks: int) -> int:
        """Return the number of 32-bit words that `entries` entries take."""
        return 2 * blocks + words_for(entries, 16) + words_for(entries, 8)

    def ordered(self, entries: Entries) -> Entries:
        """Return the entries sorted by position, as `encode` needs them."""
        return by_position(entries)

    def encode(self, entries: Entries, blocks: int) -> Words:
        """Return the words for entries that are sorted by position."""
        ends, offsets = addresses(entries.positions, blocks)
        values = finite(entries.values)
        block = block_of(ends, values.size)
        tops = jnp.zeros(blocks, jnp.float32).at[block].max(jnp.abs(values), mode="drop")
        scales = tops / self.most
        scale = scales.at[block].get(mode="fill", fill_value=0.0)
        scaled = jnp.where(scale > 0, values / jnp.where(scale > 0, scale, 1.0), 0.0)
        scaled = jnp.clip(scaled, -self.most, self.most)
        byte = (
            as_bits(scaled.astype(jnp.float8_e4m3fn), jnp.uint8)
            if self.kind == "fp8"
            else as_bits(jnp.round(scaled).astype(jnp.int8), jnp.uint8)
        )
        parts = ends, as_bits(scales, jnp.uint32), packed(offsets, 16), packed(byte, 8)
        return jnp.concatenate(parts)

    def decode(self, words: Words, count: int, blocks: int) -> Entries:
        """Return the entries behind some words, in the order of `encode`."""
        ends, scales = words[:blocks], as_bits(words[blocks : 2 * blocks], jnp.float32)
        middle = 2 * blocks + words_for(count, 16)
        offsets = unpacked(words[2 * blocks : middle], 16, count)
        byte = unpacked(words[middle:], 8, count).astype(jnp.uint8)
        kind = jnp.float8_e4m3fn if self.kind == "fp8" else jnp.int8
        scale = scales.at[block_of(ends, count)].get(mode="fill", fill_value=0.0)
        values = as_bits(byte, kind).astype(jnp.float32) * scale
        return Entries(values, positions_of(ends, offsets))
