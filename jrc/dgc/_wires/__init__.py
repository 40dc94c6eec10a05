"""Wire formats: how entries become 32-bit words, and what the other side reads.

A collective moves words and converts nothing: half-precision numbers would travel as float32 on
CPUs. The short formats write where an entry stands within its block of 65,536 in 16 bits; one word
for each block says where its entries end.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jrc._typing import Array, Float, Int
from jrc.dgc._entries import BLOCK, BLOCK_BITS, Entries

Words = Int[Array, " words"]


@dataclasses.dataclass(frozen=True)
class Float32:
    """A float32 value and its position: 8 bytes an entry, nothing is lost."""

    def words(self, entries: int, blocks: int) -> int:
        """Words that so many entries take."""
        del blocks
        return 2 * entries

    def ordered(self, entries: Entries) -> Entries:
        """The entries in an order in which they can be written: any."""
        return entries

    def encode(self, entries: Entries, blocks: int) -> Words:
        """Write entries."""
        del blocks
        return jnp.concatenate([_bits(entries.values, jnp.uint32), entries.positions])

    def decode(self, words: Words, count: int, blocks: int) -> Entries:
        """Read what arrived, in the order in which it was written."""
        del blocks
        return Entries(_bits(words[:count], jnp.float32), words[count:])


@dataclasses.dataclass(frozen=True)
class BFloat16:
    """A bfloat16 value and its place in its block in one word: 4 bytes an entry, 4 a block."""

    def words(self, entries: int, blocks: int) -> int:
        """Words that so many entries take."""
        return blocks + entries

    def ordered(self, entries: Entries) -> Entries:
        """The entries in an order in which they can be written: that of their positions."""
        return _by_position(entries)

    def encode(self, entries: Entries, blocks: int) -> Words:
        """Write entries that are in the order of their positions."""
        ends, offsets = _addresses(entries.positions, blocks)
        bits = _bits(_finite(entries.values).astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32)
        return jnp.concatenate([ends, bits << BLOCK_BITS | offsets])

    def decode(self, words: Words, count: int, blocks: int) -> Entries:
        """Read what arrived, in the order in which it was written."""
        ends, both = words[:blocks], words[blocks:]
        bits = (both >> BLOCK_BITS).astype(jnp.uint16)
        values = _bits(bits, jnp.bfloat16).astype(jnp.float32)
        return Entries(values, _positions(ends, both & (BLOCK - 1)))


@dataclasses.dataclass(frozen=True)
class EightBits:
    """A byte for the value, two for its place: 3 bytes an entry, 8 a block.

    Attributes:
        kind: `"fp8"` (4 bits of exponent, 3 of mantissa) or `"int8"`, times the block's scale: the
            largest magnitude in a block is exact, but for the rounding of the scale.
    """

    kind: str

    def __post_init__(self) -> None:
        """Check the kind."""
        if self.kind not in ("fp8", "int8"):
            raise ValueError(
                f"jrc.dgc.EightBits: kind must be one of 'fp8', 'int8', got {self.kind!r}; "
                "take wire='f32' or wire='bf16' for longer values"
            )

    @property
    def most(self) -> float:
        """The largest number that a byte says."""
        return 448.0 if self.kind == "fp8" else 127.0

    def words(self, entries: int, blocks: int) -> int:
        """Words that so many entries take."""
        return 2 * blocks + -(-entries // 2) + -(-entries // 4)

    def ordered(self, entries: Entries) -> Entries:
        """The entries in an order in which they can be written: that of their positions."""
        return _by_position(entries)

    def encode(self, entries: Entries, blocks: int) -> Words:
        """Write entries that are in the order of their positions."""
        ends, offsets = _addresses(entries.positions, blocks)
        values = _finite(entries.values)
        block = _block_of(ends, values.size)
        tops = jnp.zeros(blocks, jnp.float32).at[block].max(jnp.abs(values), mode="drop")
        scales = tops / self.most
        scale = scales.at[block].get(mode="fill", fill_value=0.0)
        scaled = jnp.where(scale > 0, values / jnp.where(scale > 0, scale, 1.0), 0.0)
        scaled = jnp.clip(scaled, -self.most, self.most)
        byte = (
            _bits(scaled.astype(jnp.float8_e4m3fn), jnp.uint8)
            if self.kind == "fp8"
            else _bits(jnp.round(scaled).astype(jnp.int8), jnp.uint8)
        )
        parts = ends, _bits(scales, jnp.uint32), _packed(offsets.astype(jnp.uint16)), _packed(byte)
        return jnp.concatenate(parts)

    def decode(self, words: Words, count: int, blocks: int) -> Entries:
        """Read what arrived, in the order in which it was written."""
        ends, scales = words[:blocks], _bits(words[blocks : 2 * blocks], jnp.float32)
        middle = 2 * blocks + -(-count // 2)
        offsets = _unpacked(words[2 * blocks : middle], jnp.uint16, count)
        byte = _unpacked(words[middle:], jnp.uint8, count)
        kind = jnp.float8_e4m3fn if self.kind == "fp8" else jnp.int8
        scale = scales.at[_block_of(ends, count)].get(mode="fill", fill_value=0.0)
        values = _bits(byte, kind).astype(jnp.float32) * scale
        return Entries(values, _positions(ends, offsets.astype(jnp.uint32)))


Wire = Float32 | BFloat16 | EightBits

WIRES: dict[str, Wire] = {
    "f32": Float32(),
    "bf16": BFloat16(),
    "fp8": EightBits("fp8"),
    "int8": EightBits("int8"),
}
"""The formats by name."""


def _bits(x: Array, dtype: jax.typing.DTypeLike) -> Array:
    return lax.bitcast_convert_type(x, dtype)


def _finite(values: Float[Array, " k"]) -> Float[Array, " k"]:
    """Numbers that a short format can say; what lies beyond stays behind."""
    most = float(jnp.finfo(jnp.bfloat16).max)
    return jnp.clip(values, -most, most)


def _by_position(entries: Entries) -> Entries:
    positions, values = lax.sort((entries.positions, entries.values), num_keys=1)
    return Entries(values, positions)


def _addresses(
    positions: Int[Array, " k"], blocks: int
) -> tuple[Int[Array, " blocks"], Int[Array, " k"]]:
    """Where each block's entries end among sorted positions, and the places in their blocks."""
    firsts = jnp.arange(1, blocks + 1, dtype=jnp.uint32)
    ends = jnp.searchsorted(positions >> BLOCK_BITS, firsts, side="left")
    return ends.astype(jnp.uint32), positions & (BLOCK - 1)


def _block_of(ends: Int[Array, " blocks"], count: int) -> Int[Array, " k"]:
    """The block of each entry; behind the last one for entries that belong to none."""
    places = jnp.arange(count, dtype=jnp.uint32)
    return jnp.searchsorted(ends, places, side="right").astype(jnp.uint32)


def _positions(ends: Int[Array, " blocks"], offsets: Int[Array, " k"]) -> Int[Array, " k"]:
    return _block_of(ends, offsets.size) << BLOCK_BITS | offsets


def _packed(parts: Int[Array, " k"]) -> Words:
    """Short integers, several in a word."""
    each = 4 // parts.dtype.itemsize
    filled = jnp.pad(parts, (0, -parts.size % each))
    return _bits(filled.reshape(-1, each), jnp.uint32)


def _unpacked(words: Words, dtype: jax.typing.DTypeLike, count: int) -> Int[Array, " k"]:
    return _bits(words, dtype).reshape(-1)[:count]
