"""The selector `"two_stage"`: a top-k of block maxima, then the largest entry of each block."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from jrc._typing import Array, Float, Int
from jrc._validate import whole_number
from jrc.dgc._entries import Entries, Space
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

    def __post_init__(self) -> None:
        """Check the number of blocks."""
        whole_number(
            self.blocks, "blocks", "jrc.dgc.TwoStage", least=1, remedy="TwoStage() takes 8."
        )

    def choose(self, leaves: Leaves, counts: Sequence[int], space: Space) -> Entries:
        """Return the entries to send, `counts[i]` of leaf i."""
        return choose_each(lambda x, k: largest_of_maxima(x, k, self.blocks), leaves, counts, space)


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
    n = values.size
    groups = -(-n // GROUP)
    # At most `GROUP`, or the maximum would unroll into a long program.
    each = min(groups // (k * blocks), GROUP)
    if n <= SMALL or each < 2:
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
