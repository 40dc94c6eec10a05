"""The selector `"blocked"`: the largest entries of each block, one top-k for all blocks."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jrc._errors import public
from jrc._typing import Array, Float, Int
from jrc._validate import whole_number
from jrc.dgc._entries import Entries, Space
from jrc.dgc._selectors.accelerators import Cut, by_platform, chosen_in_cuts
from jrc.dgc._selectors.protocol import Leaves, choose_each
from jrc.dgc._selectors.top_k import GROUP, group_maxima, magnitudes, members


@dataclasses.dataclass(frozen=True)
class Blocked:
    """The largest entries of each block of a leaf, in proportion to the block's size.

    Attributes:
        size: Entries of a block, rounded down to groups of 16, at least one group. With 16,384 a
            sparsity of 0.999 takes 16 entries of each.
    """

    size: int = 16384
    by_leaf = True

    @public("jrc.dgc.Blocked")
    def __post_init__(self) -> None:
        """Check the size."""
        whole_number(self.size, "size", least=1, remedy="Blocked() takes 16384.")

    def choose(self, leaves: Leaves, counts: Sequence[int], space: Space) -> Entries:
        """Return the entries to send, block by block, `counts[i]` of leaf i."""
        sizes = [leaf.size for leaf in leaves]
        blocks = [blocks_of(n, k, self.size) for n, k in zip(sizes, counts, strict=True)]
        cuts = [Cut(n, b.width * GROUP, b.counts) for n, b in zip(sizes, blocks, strict=True)]

        def choose(leaf: Array, k: int) -> Array:
            return largest_in_blocks(leaf, blocks_of(leaf.size, k, self.size))

        return by_platform(
            leaves,
            lambda leaves: choose_each(choose, leaves, counts, space),
            lambda leaves, how: chosen_in_cuts(leaves, cuts, space, how),
        )


class Blocks(NamedTuple):
    """The blocks of a leaf.

    Attributes:
        width: Groups of `GROUP` entries in a block; the last block may be short.
        counts: Entries to send of each block.
    """

    width: int
    counts: tuple[int, ...]


@functools.lru_cache(maxsize=8)  # leaves of equal size follow each other
def blocks_of(size: int, k: int, block: int) -> Blocks:
    """Return the blocks of a leaf, each with at least one entry to send, k in all.

    Args:
        size: Entries of the leaf.
        k: Entries to send, in [1, size].
        block: Entries of a block; blocks are larger if there would be less than one entry to send
            for each.

    Returns:
        The blocks, each with a count in proportion to its entries.

    >>> blocks_of(100, 5, 32)
    Blocks(width=2, counts=(1, 2, 1, 1))
    """
    groups = -(-size // GROUP)
    width = -(-groups // min(k, -(-groups // max(1, block // GROUP))))
    starts = np.arange(0, groups, width) * GROUP
    # Integers, because float64 rounds products of large sizes; of Python where 64 bits are too few.
    edges = np.append(starts, size).astype(np.int64 if k * size < 2**63 else object)
    counts = np.diff(k * edges // size)
    for place in np.flatnonzero(counts == 0):
        counts[np.argmax(counts)] -= 1
        counts[place] = 1
    return Blocks(width, tuple(counts.tolist()))


def largest_in_blocks(values: Float[Array, " n"], blocks: Blocks) -> Int[Array, " k"]:
    """Return the indices of the largest entries of each block.

    Args:
        values: float32.
        blocks: From `blocks_of`.

    Returns:
        Unique int32 indices in [0, n), block by block.
    """
    rows, most = len(blocks.counts), max(blocks.counts)
    maxima = group_maxima(values)
    padded = jnp.pad(maxima, (0, rows * blocks.width - maxima.size), constant_values=-1.0)
    groups = lax.top_k(padded.reshape(rows, blocks.width), min(most, blocks.width))[1]
    first = (jnp.arange(rows, dtype=jnp.int32) * blocks.width)[:, None]
    candidates = members((jnp.sort(groups, axis=1) + first).reshape(-1), GROUP).reshape(rows, -1)
    found = magnitudes(values, candidates)
    chosen = jnp.take_along_axis(candidates, lax.top_k(found, most)[1], axis=1)
    wanted = np.arange(most) < np.asarray(blocks.counts)[:, None]
    return chosen.reshape(-1)[np.flatnonzero(wanted)]
