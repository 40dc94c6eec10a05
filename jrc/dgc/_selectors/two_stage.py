"""The selector `"two_stage"`: a top-k of block maxima, then the largest entry of each block."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jrc._typing import Array, Float, Int
from jrc._validate import whole_number
from jrc.dgc._entries import Entries, Space
from jrc.dgc._selectors.accelerators import (
    Rows,
    by_platform,
    largest_in_cuts,
    largest_of_rows,
    whole,
)
from jrc.dgc._selectors.protocol import Leaves, choose_each, entries_at
from jrc.dgc._selectors.top_k import (
    GROUP,
    SMALL,
    group_maxima,
    largest,
    magnitudes,
    maxima_of,
    members,
)


@dataclasses.dataclass(frozen=True)
class TwoStage:
    """The largest entry of each of the k blocks of a leaf with the largest maxima.

    Attributes:
        blocks: Blocks for each entry that is sent; with more blocks the choice is nearer to the
            exact one.
    """

    blocks: int = 8
    by_leaf = True

    def __post_init__(self) -> None:
        """Check the number of blocks."""
        whole_number(
            self.blocks, "blocks", "jrc.dgc.TwoStage", least=1, remedy="TwoStage() takes 8."
        )

    def choose(self, leaves: Leaves, counts: Sequence[int], space: Space) -> Entries:
        """Return the entries to send, `counts[i]` of leaf i."""

        def choose(leaf: Array, k: int) -> Array:
            return largest_of_maxima(leaf, k, self.blocks)

        return by_platform(
            leaves,
            lambda leaves: choose_each(choose, leaves, counts, space),
            lambda leaves, *how: self._counted(leaves, counts, space, *how),
        )

    def _counted(
        self, leaves: Leaves, counts: Sequence[int], space: Space, width: int, together: bool
    ) -> Entries:
        """Return the same entries as on a CPU, without a sort."""
        groups = [
            groups_of(leaf.size, k, self.blocks) for leaf, k in zip(leaves, counts, strict=True)
        ]
        indices: list[Any] = [None] * len(leaves)
        for exact in (True, False):
            places = [i for i, each in enumerate(groups) if (each < 2) == exact]
            some = [leaves[i] for i in places]
            if exact:
                cuts = [whole(leaves[i].size, counts[i]) for i in places]
                found = largest_in_cuts(some, cuts, width, together) if some else []
            else:
                rows = [Rows(groups[i] * GROUP, counts[i]) for i in places]
                found = largest_of_rows(some, rows, together) if some else []
            for place, each in zip(places, found, strict=True):
                indices[place] = each
        return entries_at(leaves, indices, space)


def groups_of(size: int, k: int, blocks: int) -> int:
    """Return the groups of `GROUP` entries in a block; below two the choice is the exact one."""
    # At most `GROUP`, or the maximum would unroll into a long program.
    return min(-(-size // GROUP) // (k * blocks), GROUP) if size > SMALL else 0


def largest_of_maxima(values: Float[Array, " n"], k: int, blocks: int) -> Int[Array, " k"]:
    """Return the largest entry of each of the k blocks with the largest maxima.

    Args:
        values: float32.
        k: Entries to select, in [1, n]; static.
        blocks: Blocks for each entry that is selected.

    Returns:
        Unique int32 indices, in no promised order; exactly the largest where a block would be a
        group of `GROUP` entries or less.
    """
    each = groups_of(values.size, k, blocks)
    if each < 2:
        return largest(values, k)
    maxima = group_maxima(values)
    block = lax.top_k(maxima_of(maxima, each), k)[1]
    group = _first_largest(maxima, block, each)
    return _first_largest(values, group, GROUP)


def _first_largest(values: Float[Array, " n"], groups: Int[Array, " m"], each: int) -> Array:
    """Return the index of the largest entry of each of some groups."""
    candidates = members(groups, each)
    best = jnp.argmax(magnitudes(values, candidates), axis=1, keepdims=True)
    return jnp.take_along_axis(candidates, best, axis=1)[:, 0]
