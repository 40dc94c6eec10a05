"""The selectors `"exact"` and `"global"`: a top-k of each leaf, or of all leaves together."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp

from jrc.dgc._entries import Entries, Space
from jrc.dgc._selectors.accelerators import by_platform, chosen_in_cuts, chosen_of_all, whole
from jrc.dgc._selectors.protocol import Leaves, choose_each
from jrc.dgc._selectors.top_k import largest


@dataclasses.dataclass(frozen=True)
class Exact:
    """The k entries of largest magnitude of each leaf; ties go to the lowest index."""

    by_leaf = True

    def choose(self, leaves: Leaves, counts: Sequence[int], space: Space) -> Entries:
        """Return the entries to send, `counts[i]` of leaf i."""
        cuts = [whole(leaf.size, k) for leaf, k in zip(leaves, counts, strict=True)]
        return by_platform(
            leaves,
            lambda leaves: choose_each(largest, leaves, counts, space),
            lambda leaves, how: chosen_in_cuts(leaves, cuts, space, how),
        )


@dataclasses.dataclass(frozen=True)
class Global:
    """The entries of largest magnitude of all leaves together, `sum(counts)` of them.

    Of a transform with more than 2**31 entries: of each run of leaves that has fewer.
    """

    by_leaf = False

    def choose(self, leaves: Leaves, counts: Sequence[int], space: Space) -> Entries:
        """Return the entries to send, `sum(counts)` of all leaves together."""
        k = sum(counts)
        return by_platform(
            leaves,
            lambda leaves: self._sorted(leaves, k, space),
            lambda leaves, how: chosen_of_all(leaves, k, space, how),
        )

    def _sorted(self, leaves: Leaves, k: int, space: Space) -> Entries:
        everything = jnp.concatenate(leaves)
        indices = largest(everything, k)
        positions = jnp.uint32(0)
        first = 0
        for place, leaf in enumerate(leaves):
            inside = (indices >= first) & (indices < first + leaf.size)
            positions = jnp.where(inside, space.positions(place, indices - first), positions)
            first += leaf.size
        return Entries(everything[indices], positions)
