"""The selectors: which entries of all compressed leaves a step sends."""

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp

from jrc._typing import Array, Float, Int
from jrc.dgc._entries import Entries, Space
from jrc.dgc._selectors.blocks import blocks_of, largest_in_blocks
from jrc.dgc._selectors.top_k import largest, largest_of_maxima, largest_sampled

Flats = Sequence[Float[Array, " n"]]
"""One flat float32 array for each compressed leaf."""


def _check_whole(kind: str, name: str, value: int) -> None:
    """That a count is one."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"jrc.dgc.{kind}: {name} must be an int of at least 1, got {value!r}; "
            f"{kind}() takes the usual"
        )


@dataclasses.dataclass(frozen=True)
class Exact:
    """Per leaf, the k entries of largest magnitude; ties go to the lowest index."""

    by_leaf = True

    def choose(self, leaves: Flats, counts: Sequence[int], space: Space) -> Entries:
        """The entries to send; `counts` says how many of each leaf."""
        return _each(largest, leaves, counts, space)


@dataclasses.dataclass(frozen=True)
class TwoStage:
    """Per leaf, the largest entries of the k blocks with the largest maxima, one of each block.

    Attributes:
        blocks: Blocks for each entry that is sent; more of them come nearer to the exact choice.
    """

    blocks: int = 8
    by_leaf = True

    def __post_init__(self) -> None:
        """Check the number of blocks."""
        _check_whole("TwoStage", "blocks", self.blocks)

    def choose(self, leaves: Flats, counts: Sequence[int], space: Space) -> Entries:
        """The entries to send; `counts` says how many of each leaf."""
        return _each(lambda x, k: largest_of_maxima(x, k, self.blocks), leaves, counts, space)


@dataclasses.dataclass(frozen=True)
class Blocked:
    """Of each block of a leaf the largest entries, as many as is its share of k.

    Attributes:
        size: Entries of a block, in whole groups of 16 and at least one of them. With 16,384 a
            sparsity of 0.999 takes 16 of each, which is what XLA's quick top-k on GPUs can do.
    """

    size: int = 16384
    by_leaf = True

    def __post_init__(self) -> None:
        """Check the size."""
        _check_whole("Blocked", "size", self.size)

    def choose(self, leaves: Flats, counts: Sequence[int], space: Space) -> Entries:
        """The entries to send, block by block; `counts` says how many of each leaf."""

        def choose(leaf: Array, k: int) -> Array:
            return largest_in_blocks(leaf, blocks_of(leaf.size, k, self.size))

        return _each(choose, leaves, counts, space)


@dataclasses.dataclass(frozen=True)
class Global:
    """The entries of largest magnitude of all leaves together, as many as `counts` adds up to."""

    by_leaf = False

    def choose(self, leaves: Flats, counts: Sequence[int], space: Space) -> Entries:
        """The entries to send; only the sum of `counts` matters."""
        everything = jnp.concatenate(leaves)
        indices = largest(everything, sum(counts))
        positions = jnp.uint32(0)
        first = 0
        for place, leaf in enumerate(leaves):
            inside = (indices >= first) & (indices < first + leaf.size)
            positions = jnp.where(inside, space.positions(place, indices - first), positions)
            first += leaf.size
        return Entries(everything[indices], positions)


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Per leaf, about the largest: those from a threshold on that a sample of the leaf gives.

    Attributes:
        share: Of the leaf, that is looked at for the threshold.
    """

    share: float = 0.01
    by_leaf = True

    def __post_init__(self) -> None:
        """Check the share."""
        number = isinstance(self.share, int | float) and not isinstance(self.share, bool)
        if not number or not 0 < self.share <= 1:
            raise ValueError(
                f"jrc.dgc.Sampled: share must lie in (0, 1], got {self.share!r}; 0.01 looks at "
                "one entry in a hundred"
            )

    def choose(self, leaves: Flats, counts: Sequence[int], space: Space) -> Entries:
        """The entries to send; `counts` says how many of each leaf."""
        return _each(lambda x, k: largest_sampled(x, k, self.share), leaves, counts, space)


Selector = Exact | TwoStage | Blocked | Global | Sampled

SELECTORS: dict[str, Selector] = {
    "exact": Exact(),
    "two_stage": TwoStage(),
    "blocked": Blocked(),
    "global": Global(),
    "sampled": Sampled(),
}
"""The selectors by name."""

DEFAULT_SELECTOR = "exact"


def _each(
    choose: Callable[[Array, int], Int[Array, " k"]],
    leaves: Flats,
    counts: Sequence[int],
    space: Space,
) -> Entries:
    """What a rule for one leaf chooses of each, in the order of the leaves."""
    values, positions = [], []
    for place, (leaf, k) in enumerate(zip(leaves, counts, strict=True)):
        indices = choose(leaf, k)
        values.append(leaf[indices])
        positions.append(space.positions(place, indices))
    return Entries(jnp.concatenate(values), jnp.concatenate(positions))
