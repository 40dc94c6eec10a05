"""Gradient entries as values with positions, and the numbering of positions over many leaves."""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jrc._typing import Array, Float, Int, UInt

BLOCK_BITS = 16
BLOCK = 1 << BLOCK_BITS
"""Entries of a block of positions: an offset within a block fits into 16 bits."""

MOST_BLOCKS = 1 << (31 - BLOCK_BITS)
"""Blocks of one space: positions are below 2**31, so that those of no leaf lie apart."""

MOST_ENTRIES = 2**31 - 1
"""Entries of an array that is indexed: its size and its indices are int32."""

NOWHERE = np.uint32(2**32 - 1)
"""A position of no leaf. Every position at or above the space's last block is one too."""


class Entries(NamedTuple):
    """Some entries of several leaves.

    Attributes:
        values: float32[k].
        positions: uint32[k], unique positions in a `Space`.
    """

    values: Float[Array, " k"]
    positions: UInt[Array, " k"]


class LeafEntries(NamedTuple):
    """Some entries of one leaf.

    Attributes:
        values: float32[k].
        indices: int32[k]; an index outside of the leaf, a negative one too, means no entry.
    """

    values: Float[Array, " k"]
    indices: Int[Array, " k"]


class Space(NamedTuple):
    """The numbering of all entries of some flat leaves; each leaf begins with a new block.

    Attributes:
        sizes: Entries of each leaf.
    """

    sizes: tuple[int, ...]

    @property
    def starts(self) -> tuple[int, ...]:
        """The position of each leaf's first entry, and the first position behind the last leaf."""
        return _starts(self.sizes)

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return self.starts[-1] // BLOCK

    def positions(self, place: int, indices: Int[Array, " k"]) -> UInt[Array, " k"]:
        """Return the positions of entries of the leaf number `place`."""
        return indices.astype(jnp.uint32) + np.uint32(self.starts[place])

    def leaves(self, entries: Entries, counts: Sequence[int] | None) -> list[LeafEntries]:
        """Return the entries leaf by leaf.

        Args:
            entries: In the order of the leaves where `counts` are given.
            counts: How many belong to each leaf. If that is `None`, every leaf gets all entries,
                with indices behind its end for those of other leaves.

        Returns:
            One `LeafEntries` for each leaf.
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

    def _index(self, place: int, positions: UInt[Array, " k"]) -> Int[Array, " k"]:
        return (positions - np.uint32(self.starts[place])).astype(jnp.int32)

    def _within(self, place: int, positions: UInt[Array, " k"]) -> Int[Array, " k"]:
        start, size = self.starts[place], self.sizes[place]
        inside = (positions >= np.uint32(start)) & (positions < np.uint32(start + size))
        return jnp.where(inside, self._index(place, positions), size)


@functools.lru_cache(maxsize=64)
def _starts(sizes: tuple[int, ...]) -> tuple[int, ...]:
    blocks = (-(-size // BLOCK) for size in sizes)
    return tuple(BLOCK * before for before in itertools.accumulate(blocks, initial=0))


def shifted(positions: Array, start: Array | int, blocks: int) -> UInt[Array, "..."]:
    """Return positions of a part of a space as positions of the whole space.

    Args:
        positions: uint32, counted from the first block of the part.
        start: The position of that block in the whole space.
        blocks: Blocks of the part.

    Returns:
        uint32 positions, `NOWHERE` for those behind the part's last block.
    """
    there = positions + jnp.uint32(start)
    return jnp.where(positions < np.uint32(blocks * BLOCK), there, NOWHERE)


def fits(size: int) -> bool:
    """Whether entries of a flat array of this size can be indexed, and so sent with positions."""
    return size <= MOST_ENTRIES


def buckets_of(sizes: Sequence[int]) -> tuple[slice, ...]:
    """Return ranges of leaves whose entries can share one space.

    Args:
        sizes: Entries of each leaf.

    Returns:
        Slices of the leaves, in their order: one where all have fewer than 2**31 entries together.

    Raises:
        ValueError: When a leaf alone is too large.

    >>> buckets_of([2**30, 2**30, 5])
    (slice(0, 1, None), slice(1, 3, None))
    """
    buckets, start, blocks, entries = [], 0, 0, 0
    for place, size in enumerate(sizes):
        if not fits(size):
            raise ValueError(
                "a leaf that is sent with positions must have at most "
                f"{MOST_ENTRIES:,} entries, got {size:,}. Split the leaf, or pass exchange='dense'."
            )
        own = -(-size // BLOCK)
        full = blocks + own > MOST_BLOCKS or not fits(entries + size)
        if place > start and full:
            buckets.append(slice(start, place))
            start, blocks, entries = place, 0, 0
        blocks, entries = blocks + own, entries + size
    return (*buckets, slice(start, len(sizes)))
