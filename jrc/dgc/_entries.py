"""What crosses the wire: values, and where in the tree they belong."""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jrc._typing import Array, Float, Int

BLOCK_BITS = 16
BLOCK = 1 << BLOCK_BITS
"""Positions within a block fit into 16 bits."""


NOWHERE = np.uint32(2**32 - 1)
"""A position that belongs to no leaf; so do those below it that no leaf reaches."""


class Entries(NamedTuple):
    """Some entries of a tree: `values: float32[k]` at unique `positions: uint32[k]` of a space."""

    values: Float[Array, " k"]
    positions: Int[Array, " k"]


class LeafEntries(NamedTuple):
    """Some entries of one leaf; an index outside of it, negative ones too, stands for no entry."""

    values: Float[Array, " k"]
    indices: Int[Array, " k"]


class Space(NamedTuple):
    """The positions of all entries of some flat leaves, of which each begins with a new block.

    Attributes:
        sizes: Entries of each leaf.
    """

    sizes: tuple[int, ...]

    @property
    def starts(self) -> tuple[int, ...]:
        """The position of each leaf's first entry, and the first that belongs to none."""
        return _starts(self.sizes)

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return self.starts[-1] // BLOCK

    def positions(self, place: int, indices: Int[Array, " k"]) -> Int[Array, " k"]:
        """The positions of a leaf's entries."""
        return indices.astype(jnp.uint32) + np.uint32(self.starts[place])

    def leaves(self, entries: Entries, counts: Sequence[int] | None) -> list[LeafEntries]:
        """The entries leaf by leaf.

        Args:
            entries: In the order of the leaves where `counts` are given.
            counts: How many belong to each leaf; if that is not known, every leaf is given all of
                them, with indices behind its end for those of other leaves.

        Returns:
            One for each leaf.
        """
        if counts is None:
            return [
                LeafEntries(entries.values, self._within(place, entries.positions))
                for place in range(len(self.sizes))
            ]
        ends = np.cumsum(counts)
        parts = [
            Entries(entries.values[end - k : end], entries.positions[end - k : end])
            for k, end in zip(counts, ends, strict=True)
        ]
        return [
            LeafEntries(part.values, self._index(place, part.positions))
            for place, part in enumerate(parts)
        ]

    def check(self) -> None:
        """That positions are 31-bit numbers, so that those that are nowhere lie apart.

        Raises:
            ValueError: When there are more.
        """
        if self.blocks > BLOCK // 2:
            raise ValueError(
                "jrc.scale_by_dgc: one transform compresses at most 2**31 entries, got "
                f"{sum(self.sizes):,}; give parts of the tree to transforms of their own with "
                "optax.multi_transform"
            )

    def _index(self, place: int, positions: Int[Array, " k"]) -> Int[Array, " k"]:
        return (positions - np.uint32(self.starts[place])).astype(jnp.int32)

    def _within(self, place: int, positions: Int[Array, " k"]) -> Int[Array, " k"]:
        start, size = self.starts[place], self.sizes[place]
        inside = (positions >= np.uint32(start)) & (positions < np.uint32(start + size))
        return jnp.where(inside, self._index(place, positions), size)


@functools.lru_cache(maxsize=64)
def _starts(sizes: tuple[int, ...]) -> tuple[int, ...]:
    blocks = (-(-size // BLOCK) for size in sizes)
    return tuple(BLOCK * before for before in itertools.accumulate(blocks, initial=0))


def moved(positions: Array, start: Array | int, blocks: int) -> Int[Array, "..."]:
    """Positions that count from `start` on, in the space of all leaves.

    Args:
        positions: uint32; those behind the blocks are nowhere.
        start: Where the first block begins.
        blocks: How many blocks there are.

    Returns:
        The positions, or `NOWHERE`.
    """
    there = positions + jnp.uint32(start)
    return jnp.where(positions < np.uint32(blocks * BLOCK), there, NOWHERE)
