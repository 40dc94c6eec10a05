"""The selector `"sampled"`: entries above a threshold that a sample of the leaf gives."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from jrc._errors import public
from jrc._typing import Array, Float, Int
from jrc._validate import is_real
from jrc.dgc._entries import Entries, Space
from jrc.dgc._selectors.accelerators import by_platform, chosen_in_cuts, whole
from jrc.dgc._selectors.protocol import Leaves, choose_each
from jrc.dgc._selectors.threshold import sample_of
from jrc.dgc._selectors.top_k import RARE, SMALL, group_maxima, largest, largest_within

HITS = 32
"""Of the k largest entries, the number that a sample should have at least for an estimate."""


@dataclasses.dataclass(frozen=True)
class Sampled:
    """About the k largest entries of each leaf: those above a threshold that a sample gives.

    On accelerators exactly the k largest, which are found there without a sort.

    Attributes:
        share: Share of the leaf that is sampled for the threshold, in (0, 1].
    """

    share: float = 0.01
    by_leaf = True

    @public("jrc.dgc.Sampled")
    def __post_init__(self) -> None:
        """Check the share."""
        if not is_real(self.share) or not 0 < self.share <= 1:
            raise ValueError(
                f"share must be a number in (0, 1], got {self.share!r}. "
                "Write 0.01 to sample one entry in a hundred."
            )

    def choose(self, leaves: Leaves, counts: Sequence[int], space: Space) -> Entries:
        """Return the entries to send, `counts[i]` of leaf i."""
        cuts = [whole(leaf.size, k) for leaf, k in zip(leaves, counts, strict=True)]

        def choose(leaf: Array, k: int) -> Array:
            return largest_sampled(leaf, k, self.share)

        return by_platform(
            leaves,
            lambda leaves: choose_each(choose, leaves, counts, space),
            lambda leaves, how: chosen_in_cuts(leaves, cuts, space, how),
        )


def largest_sampled(values: Float[Array, " n"], k: int, share: float) -> Int[Array, " k"]:
    """Return about the k largest entries: those above a threshold that a sample gives.

    Candidates are the entries of groups of `GROUP` neighbours whose maximum is at or above the
    threshold, at most 2k groups; other groups fill up if there are fewer than k.

    Args:
        values: float32.
        k: Entries to select, in [1, n]; static.
        share: Share of the entries that is sampled; more where k is small.

    Returns:
        Unique int32 indices, in no promised order.

    Source: Lin et al., "Deep Gradient Compression", arXiv:1712.01887, section 5 (hierarchical
    threshold selection).
    """
    n = values.size
    if n <= SMALL or k * RARE > n:
        return largest(values, k)
    sample = jnp.abs(sample_of(values, max(1, min(int(1 / share), k // HITS))))
    # A rank of 1.25 k, so that the threshold is seldom too high.
    reached = lax.top_k(sample, max(1, min(sample.size, int(1.25 * k * sample.size / n) + 1)))[0]
    # Where most entries are zero the threshold may be zero, which every entry would pass.
    maxima = group_maxima(values)
    above = (maxima >= reached[-1]) & (maxima > 0)
    size = min(above.size, 2 * k)
    yes = jnp.nonzero(above, size=size)[0]
    no = jnp.nonzero(~above, size=size)[0]
    place = jnp.arange(size, dtype=jnp.int32)
    count = jnp.sum(above, dtype=jnp.int32)
    groups = jnp.where(place < count, yes, no[jnp.maximum(place - count, 0)])
    return largest_within(values, groups.astype(jnp.int32), k)
