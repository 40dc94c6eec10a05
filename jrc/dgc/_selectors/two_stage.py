"""The selector `"two_stage"`: a top-k of block maxima, then the largest entry of each block."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from jrc._errors import public
from jrc._typing import Array, Float, Int
from jrc._validate import whole_number
from jrc.dgc._entries import Entries, Space
from jrc.dgc._selectors.accelerators import Cut, by_platform, chosen_in_cuts, whole
from jrc.dgc._selectors.protocol import Leaves, choose_each
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

    @public("jrc.dgc.TwoStage")
    def __post_init__(self) -> None:
        """Check the number of blocks."""
        whole_number(self.blocks, "blocks", least=1, remedy="TwoStage() takes 8.")

    def choose(self, leaves: Leaves, counts: Sequence[int], space: Space) -> Entries:
        """Return the entries to send, `counts[i]` of leaf i."""
        cuts = [self._cut(leaf.size, k) for leaf, k in zip(leaves, counts, strict=True)]

        def choose(leaf: Array, k: int) -> Array:
            return largest_of_maxima(leaf, k, self.blocks)

        return by_platform(
            leaves,
            lambda leaves: choose_each(choose, leaves, counts, space),
            lambda leaves, how: chosen_in_cuts(leaves, cuts, space, how),
        )

    def _cut(self, size: int, k: int) -> Cut:
        groups = groups_of(size, k, self.blocks)
        return whole(size, k)._replace(width=groups * GROUP if groups >= 2 else None)


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
