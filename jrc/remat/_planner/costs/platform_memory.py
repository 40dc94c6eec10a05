"""What the planner assumes of each platform's compiler: how much an array takes, what is fused.

>>> import jax, jax.numpy as jnp
>>> column = jax.ShapeDtypeStruct((4096, 1), jnp.float32)
>>> memory_on("cpu").array_bytes(column), memory_on("tpu").array_bytes(column)
(16384, 16384)
>>> memory_on("tpu").array_bytes(jax.ShapeDtypeStruct((256, 9, 40), jnp.bfloat16))
221184
"""

import dataclasses
import itertools
import math
from typing import Any

import jax

from jrc._jaxpr import has_operand_by_group, nbytes

_LANES = 128
_SUBLANES = 8
_WORD = 4


@dataclasses.dataclass(frozen=True)
class PlatformMemory:
    """How the compiler of a platform lays out, fuses and orders a program.

    Attributes:
        name: `"cpu"`, `"gpu"` or `"tpu"`.
        has_tiles: Whether arrays of two and more axes are padded to tiles of 8 x 128 words.
        writes_broadcasts: Whether a product, a convolution or a sum is a call of a library, which
            reads broadcast operands from memory.
        copies_operands: Whether a product or a convolution whose axes are not in the usual order
            reads copies.
        computes_operands: Whether a product or a convolution computes its operands while it reads
            what they are made from.
        continues_products: Whether arithmetic that alone reads a product or a convolution is
            computed in its kernel, so that only the last result is written.
        rounds_operands: Whether products of float32 read it as bfloat16, so that what they alone
            read is written as that.
        repeats_functions: Whether `exp`, `tanh` and the like are computed again in each reader.
        random_words: The words of 32 bits that Threefry writes for an entry of random bits, and
            needs again while it runs; with 0 readers compute the bits.
        masks_groups: Whether a product of ragged groups is one product over all groups, which reads
            a copy of the ragged operands for each group, masked.
        slices_early: Whether any slices of a value that a kernel writes are written right behind
            it, so that the rest of the value is gone; else only those that kernels read.
        starts_early: Whether an equation runs as soon as its operands are there, not in the order
            of the program.
    """

    name: str
    has_tiles: bool = False
    writes_broadcasts: bool = False
    copies_operands: bool = False
    computes_operands: bool = False
    continues_products: bool = False
    rounds_operands: bool = False
    repeats_functions: bool = False
    random_words: int = 0
    masks_groups: bool = False
    slices_early: bool = False
    starts_early: bool = False

    def threefry_bytes(self, bits: Any) -> int:
        """Return the bytes of the words that Threefry writes for a `random_bits` equation.

        It is 0 of another generator, and where readers compute the bits.
        """
        words = self.random_words if is_threefry(bits) else 0
        return words * _WORD * math.prod(bits.outvars[0].aval.shape)

    def group_bytes(self, product: Any) -> int:
        """Return the bytes of the copies for each group that a `ragged_dot_general` reads.

        The weights of the groups, if they are an operand, are copied once.
        """
        lhs, rhs, sizes = (x.aval for x in product.invars[:3])
        if not self.masks_groups:
            return 0
        groups = sizes.shape[-1]
        copies = 1 if has_operand_by_group(product) else groups
        return groups * self.array_bytes(lhs) + copies * self.array_bytes(rhs)

    def array_bytes(self, aval: Any) -> int:
        """Return the bytes of device memory that an array of this type occupies."""
        if getattr(aval, "memory_space", None) == jax.memory.Space.Host:
            return 0
        size = nbytes(aval)
        return max(size, _tiled_bytes(aval)) if self.has_tiles and size else size


CPU = PlatformMemory(
    "cpu",
    writes_broadcasts=True,
    copies_operands=True,
    random_words=2,
    masks_groups=True,
    starts_early=True,
)
_PLATFORMS = {
    "cpu": CPU,
    "gpu": PlatformMemory("gpu", repeats_functions=True, slices_early=True),
    "tpu": PlatformMemory(
        "tpu",
        has_tiles=True,
        computes_operands=True,
        continues_products=True,
        rounds_operands=True,
        repeats_functions=True,
    ),
}


def memory_on(platform: str) -> PlatformMemory:
    """Return the assumptions for a platform; those of a CPU for one that is not known."""
    return _PLATFORMS.get(platform, CPU)


def is_threefry(bits: Any) -> bool:
    """Return whether a `random_bits` equation is arithmetic; other generators are kernels."""
    return "fry" in str(bits.invars[0].aval.dtype)


def _tiled_bytes(aval: Any) -> int:
    """Return the bytes of an array in tiles, its axes in the order that pads least.

    A tile has 128 lanes and 8 rows of 32 bits; shorter types are packed, 2 or 4 to a row. Where
    there are fewer rows than that, the tile is as low as the next power of two. XLA chooses which
    two axes are tiled.

    Source: "Tiled layout", XLA documentation, https://openxla.org/xla/tiled_layout.
    """
    shape, itemsize = aval.shape, aval.dtype.itemsize
    whole = math.prod(shape)
    if len(shape) < 2 or itemsize > _WORD:
        return whole * itemsize
    rows = _SUBLANES * _WORD // itemsize
    padded = min(
        whole // (shape[i] * shape[j]) * _tile_entries(shape[i], shape[j], rows)
        for i, j in itertools.permutations(range(len(shape)), 2)
    )
    return padded * itemsize


def _tile_entries(high: int, wide: int, rows: int) -> int:
    """Return the entries of a matrix whose axes are padded to tiles."""
    low = min(rows, 1 << (high - 1).bit_length())
    return -(-high // low) * low * (-(-wide // _LANES) * _LANES)
