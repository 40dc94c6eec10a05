"""The values of a wire: their bits, the levels that a sender fits, and the codes.

Codes have the sign in their highest bit. What rounding loses stays with the sender.
"""

import dataclasses
from typing import Protocol, runtime_checkable

import jax.numpy as jnp

from jrc._bits import as_bits
from jrc._typing import Array, Float, UInt

FITS = 8
"""Iterations of Lloyd's algorithm for two levels; it is mostly still after four."""


@runtime_checkable
class Quantizer(Protocol):
    """How values are written; any object with these members works."""

    @property
    def bits(self) -> int:
        """Bits of a value."""
        ...

    @property
    def fitted(self) -> bool:
        """Whether a sender fits a lowest and a highest magnitude to its values."""
        ...

    def levels(self, values: Float[Array, "*rows k"]) -> Float[Array, "*rows 2"]:
        """Return the lowest and the highest magnitude for each row of values."""
        ...

    def codes(
        self, values: Float[Array, "*rows k"], levels: Float[Array, "*rows 2"]
    ) -> UInt[Array, "*rows k"]:
        """Return the codes of values, uint32 below 2**bits."""
        ...

    def values(
        self, codes: UInt[Array, "*rows k"], levels: Float[Array, "*rows 2"]
    ) -> Float[Array, "*rows k"]:
        """Return the float32 values of codes."""
        ...


@dataclasses.dataclass(frozen=True)
class TwoLevels:
    """Two magnitudes and a sign, fitted by Lloyd's algorithm: the least squares of the error.

    Source: Lloyd, "Least squares quantization in PCM", IEEE Transactions on Information Theory
    28 (1982).
    """

    bits = 2
    fitted = True

    def levels(self, values: Float[Array, "*rows k"]) -> Float[Array, "*rows 2"]:
        """Return the two magnitudes; zeros do not count."""
        sizes = jnp.abs(values)
        counted = sizes > 0
        low = high = _mean_of(sizes, counted)
        for _ in range(FITS):
            upper = sizes > (low + high) / 2
            fresh = _mean_of(sizes, counted & upper)
            low = _mean_of(sizes, counted & ~upper)
            high = jnp.maximum(fresh, low)  # equal values leave the upper part empty
        return jnp.concatenate([low, high], -1)

    def codes(
        self, values: Float[Array, "*rows k"], levels: Float[Array, "*rows 2"]
    ) -> UInt[Array, "*rows k"]:
        """Return 0 or 1 for the nearer magnitude, and the sign."""
        middle = levels.mean(-1, keepdims=True)
        return _signed(values, (jnp.abs(values) > middle).astype(jnp.uint32), self.bits)

    def values(
        self, codes: UInt[Array, "*rows k"], levels: Float[Array, "*rows 2"]
    ) -> Float[Array, "*rows k"]:
        """Return the magnitudes with their signs."""
        sizes = jnp.where(codes & 1, levels[..., 1:], levels[..., :1])
        return jnp.where(codes >> 1, -sizes, sizes)


@dataclasses.dataclass(frozen=True)
class EightLevels:
    """Eight magnitudes at equal distances from the least to the largest, and a sign."""

    bits = 4
    fitted = True

    def levels(self, values: Float[Array, "*rows k"]) -> Float[Array, "*rows 2"]:
        """Return the least magnitude that is not zero, and the largest."""
        sizes = jnp.abs(values)
        high = sizes.max(-1, keepdims=True)
        low = jnp.where(sizes > 0, sizes, jnp.inf).min(-1, keepdims=True)
        return jnp.concatenate([jnp.minimum(low, high), high], -1)

    def codes(
        self, values: Float[Array, "*rows k"], levels: Float[Array, "*rows 2"]
    ) -> UInt[Array, "*rows k"]:
        """Return the number of the nearest magnitude, and the sign."""
        low, step = _grid(levels)
        place = (jnp.abs(values) - low) / jnp.where(step > 0, step, 1.0)
        return _signed(values, jnp.clip(jnp.round(place), 0, 7).astype(jnp.uint32), self.bits)

    def values(
        self, codes: UInt[Array, "*rows k"], levels: Float[Array, "*rows 2"]
    ) -> Float[Array, "*rows k"]:
        """Return the magnitudes with their signs."""
        low, step = _grid(levels)
        sizes = low + step * (codes & 7).astype(jnp.float32)
        return jnp.where(codes >> 3, -sizes, sizes)


@dataclasses.dataclass(frozen=True)
class PowersOfTwo:
    """The largest magnitude, its half, its quarter, … to 1/64, zero, and a sign.

    For dense values, most of which are small: four-bit floats with three bits of exponent.

    Source: Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv:2501.18512,
    section 2.4 (E3M0).
    """

    bits = 4
    fitted = True

    def levels(self, values: Float[Array, "*rows k"]) -> Float[Array, "*rows 2"]:
        """Return zero and the largest magnitude."""
        high = jnp.abs(values).max(-1, keepdims=True)
        return jnp.concatenate([jnp.zeros_like(high), high], -1)

    def codes(
        self, values: Float[Array, "*rows k"], levels: Float[Array, "*rows 2"]
    ) -> UInt[Array, "*rows k"]:
        """Return the number of halvings, 7 for zero, and the sign."""
        high = levels[..., 1:]
        share = jnp.abs(values) / jnp.where(high > 0, high, 1.0)
        # Between 2**-n and 2**-(n+1) the nearer one changes at their mean.
        edges = [*(0.75 * 0.5**n for n in range(6)), 0.5**7]
        halvings = sum((share < edge).astype(jnp.uint32) for edge in edges)
        return _signed(values, jnp.asarray(halvings), self.bits)

    def values(
        self, codes: UInt[Array, "*rows k"], levels: Float[Array, "*rows 2"]
    ) -> Float[Array, "*rows k"]:
        """Return the magnitudes with their signs."""
        halvings = codes & 7
        powers = jnp.ldexp(jnp.float32(1), -halvings.astype(jnp.int32))
        sizes = levels[..., 1:] * jnp.where(halvings == 7, 0.0, powers)
        return jnp.where(codes >> 3, -sizes, sizes)


@dataclasses.dataclass(frozen=True)
class Floats:
    """The upper bits of float32, rounded: 32 of them, or the 16 of bfloat16."""

    bits: int
    fitted = False

    def levels(self, values: Float[Array, "*rows k"]) -> Float[Array, "*rows 2"]:
        """Return zeros."""
        return jnp.zeros((*values.shape[:-1], 2), jnp.float32)

    def codes(
        self, values: Float[Array, "*rows k"], levels: Float[Array, "*rows 2"]
    ) -> UInt[Array, "*rows k"]:
        """Return the bits of the rounded values."""
        del levels
        if self.bits == 32:
            return as_bits(values, jnp.uint32)
        short = as_bits(values.astype(jnp.bfloat16), jnp.uint16)
        return short.astype(jnp.uint32)

    def values(
        self, codes: UInt[Array, "*rows k"], levels: Float[Array, "*rows 2"]
    ) -> Float[Array, "*rows k"]:
        """Return the float32 values."""
        del levels
        return as_bits(codes << (32 - self.bits), jnp.float32)


SPARSE: dict[str, Quantizer] = {
    "2bit": TwoLevels(),
    "4bit": EightLevels(),
    "bf16": Floats(16),
    "f32": Floats(32),
}
"""Of the largest entries, whose magnitudes lie close together."""

DENSE: dict[str, Quantizer | None] = {"4bit": PowersOfTwo(), "f32": None}
"""Of all entries; `None` for those that are added up in an all-reduce."""


def _mean_of(sizes: Array, chosen: Array) -> Array:
    total = jnp.where(chosen, sizes, 0.0).sum(-1, keepdims=True)
    return total / jnp.maximum(chosen.sum(-1, keepdims=True), 1).astype(total.dtype)


def _signed(values: Array, sizes: Array, bits: int) -> Array:
    return sizes | (values < 0).astype(jnp.uint32) << (bits - 1)


def _grid(levels: Array) -> tuple[Array, Array]:
    low, high = levels[..., :1], levels[..., 1:]
    return low, (high - low) / 7
