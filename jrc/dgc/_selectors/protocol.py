"""What a selector is."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

import jax.numpy as jnp

from jrc._typing import Array, Float, Int
from jrc.dgc._entries import Entries, Space

Leaves = Sequence[Float[Array, " _n"]]
"""One flat float32 array for each compressed leaf."""


@runtime_checkable
class Selector(Protocol):
    """Which entries a step sends. Any object with these members works in `selector=`.

    Its method must be traceable.
    """

    @property
    def by_leaf(self) -> bool:
        """Whether `counts[i]` entries of leaf i are chosen, leaf after leaf in their order."""
        ...

    def choose(self, leaves: Leaves, counts: Sequence[int], space: Space) -> Entries:
        """Return the entries to send.

        Args:
            leaves: The accumulated gradients v, one flat float32 array for each leaf.
            counts: Entries to send of each leaf, known while tracing.
            space: The numbering of the leaves' entries, for `space.positions(i, indices)`.

        Returns:
            `sum(counts)` entries, `float32` values and `uint32` positions, with their values as
            they are in `leaves`. Positions must be unique: what a position gets that comes twice
            is undefined, and only an update outside of `jit` can check it.
        """
        ...


def choose_each(
    choose: Callable[[Array, int], Int[Array, " k"]],
    leaves: Leaves,
    counts: Sequence[int],
    space: Space,
) -> Entries:
    """Return what a rule for one leaf chooses of each leaf, in the order of the leaves.

    Args:
        choose: `(leaf, k) -> indices`: float32[n] and a static k to k unique int32 indices.
        leaves: One flat float32 array for each leaf.
        counts: k of each leaf.
        space: The numbering of the leaves' entries.

    Returns:
        The entries: values and positions.
    """
    indices = (choose(leaf, k) for leaf, k in zip(leaves, counts, strict=True))
    return entries_at(leaves, indices, space)


def entries_at(leaves: Leaves, indices: Iterable[Int[Array, " _k"]], space: Space) -> Entries:
    """Return the entries at some indices of each leaf, in the order of the leaves."""
    values, positions = [], []
    for place, (leaf, at) in enumerate(zip(leaves, indices, strict=True)):
        values.append(leaf[at])
        positions.append(space.positions(place, at))
    return Entries(jnp.concatenate(values), jnp.concatenate(positions))
