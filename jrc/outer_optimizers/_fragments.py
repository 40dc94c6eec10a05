"""Fragments: parts of the parameters that are exchanged at different steps of a round.

An outer optimizer may have three attributes besides those of its protocol: `fragments`, `overlap`
and `blend`. All that they mean is here and in the train step, so that no optimizer needs to know in
how many parts, and when, it is asked.
"""

import dataclasses
import itertools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrc._typing import PyTree
from jrc._validate import finite_number, whole_number
from jrc.outer_optimizers._cuts import Cuts


class Piece(NamedTuple):
    """Rows of a leaf along its leading axis; a scalar has one row.

    Attributes:
        leaf: Number of the leaf.
        start: First row.
        stop: The row behind the last.
        whole: Whether these are all rows.
    """

    leaf: int
    start: int
    stop: int
    whole: bool


@dataclasses.dataclass(frozen=True)
class Fragment:
    """A part of a parameter tree.

    Attributes:
        pieces: Its rows; `None` for the whole tree.
        index: Its number.
        count: The number of fragments.
    """

    pieces: tuple[Piece, ...] | None = None
    index: int = 0
    count: int = 1

    @property
    def is_last(self) -> bool:
        """Whether this is the last fragment of a round."""
        return self.index == self.count - 1

    def of(self, tree: PyTree) -> PyTree:
        """Return this part as a list of arrays, or the tree as it is if this is all of it."""
        if self.pieces is None:
            return tree
        leaves = jax.tree.leaves(tree)
        return [
            leaves[each.leaf] if each.whole else leaves[each.leaf][each.start : each.stop]
            for each in self.pieces
        ]

    def put(self, tree: PyTree, part: PyTree) -> PyTree:
        """Return the tree with other values in this part."""
        if self.pieces is None:
            return part
        leaves, treedef = jax.tree.flatten(tree)
        for each, new in zip(self.pieces, part, strict=True):
            old = leaves[each.leaf]
            leaves[each.leaf] = new if each.whole else old.at[each.start : each.stop].set(new)
        return treedef.unflatten(leaves)

    def shapes(self, params: Any) -> PyTree:
        """Return the shapes of this part of arrays or shapes."""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), _dtype(x)), params)
        if self.pieces is None:
            return shapes
        leaves = jax.tree.leaves(shapes)
        return [
            leaf if each.whole else leaf.update(shape=(each.stop - each.start, *leaf.shape[1:]))
            for each in self.pieces
            for leaf in [leaves[each.leaf]]
        ]

    def each(self, tree: PyTree) -> PyTree:
        """Return for each array of this part the leaf of a tree, such as one of specs."""
        if self.pieces is None:
            return tree
        leaves = jax.tree.leaves(tree)
        return [leaves[each.leaf] for each in self.pieces]

    def entry_of(self, states: PyTree) -> PyTree:
        """Return its own of a state that has an entry for each of several fragments."""
        return states if self.count == 1 else states[self.index]

    def with_entry(self, states: PyTree, new: PyTree) -> PyTree:
        """Return such a state with another entry for this fragment."""
        if self.count == 1:
            return new
        return (*states[: self.index], new, *states[self.index + 1 :])


class Turn(NamedTuple):
    """What a step does besides its inner step.

    Attributes:
        sends: The fragment whose message is made after the inner step.
        receives: The fragment whose messages are exchanged and applied; without overlap the same.
    """

    sends: int | None
    receives: int | None


INNER = Turn(None, None)


def fragment_count(outer: Any) -> int:
    """Return the number of fragments of an outer optimizer."""
    return int(getattr(outer, "fragments", 1))


def overlap_of(outer: Any) -> int:
    """Return the steps from the end of a round to that in which its result is applied, 0 or 1."""
    return int(getattr(outer, "overlap", 0))


def blend_of(outer: Any) -> float:
    """Return the share of a replica's own parameters in those that it goes on with."""
    return float(getattr(outer, "blend", 0.0))


def check_fragments(outer: Any) -> None:
    """Raise unless fragments, overlap and blend are numbers in their ranges."""
    remedy = "Write fragments=4."
    count = whole_number(outer.fragments, "fragments", least=1, remedy=remedy)
    if count > outer.sync_every:
        raise ValueError(
            "fragments must be at most sync_every, because one is exchanged in a step, got "
            f"{count} for sync_every={outer.sync_every}. {remedy}"
        )
    remedy = "1 hides an exchange behind the next step."
    overlap = whole_number(outer.overlap, "overlap", least=0, most=1, remedy=remedy)
    if overlap and 2 * count > outer.sync_every:
        raise ValueError(
            "sync_every must be at least 2 * fragments with overlap=1, so that there are "
            f"steps with no exchange under way, got {outer.sync_every!r} for fragments={count}. "
            f"Write sync_every={2 * count}."
        )
    remedy = "Write blend=0.0."
    if finite_number(blend_of(outer), "blend", remedy=remedy) >= 1:
        raise ValueError(f"blend must be a share in [0, 1), got {outer.blend!r}. {remedy}")


def turn_at(outer: Any, number: int) -> Turn:
    """Return what a step does besides its inner step.

    Args:
        outer: The outer optimizer.
        number: Number of the step, from 1.

    Returns:
        The fragments that it sends and receives.

    >>> from jrc import DiLoCo
    >>> [turn_at(DiLoCo(5, fragments=2), i).sends for i in range(1, 11)]
    [None, 0, None, None, 1, None, 0, None, None, 1]
    >>> [turn_at(DiLoCo(5, overlap=1), i).receives for i in range(1, 7)]
    [None, None, None, None, None, 0]
    """
    later = overlap_of(outer)
    return Turn(_sent_at(outer, number), _sent_at(outer, number - later))


def _sent_at(outer: Any, number: int) -> int | None:
    every, count = int(outer.sync_every), fragment_count(outer)
    if number < 1:
        return None
    ends = [(i + 1) * every // count % every for i in range(count)]
    return ends.index(number % every) if number % every in ends else None


def fragments_of(params: Any, count: int, uncut: Collection[int] = ()) -> tuple[Fragment, ...]:
    """Return parts of about equally many entries, in the order of the tree.

    A leaf is cut along its leading axis, but not close to its ends.

    Args:
        params: Arrays or shapes.
        count: Number of fragments.
        uncut: Numbers of leaves that are not cut.

    Returns:
        The fragments.

    Raises:
        ValueError: If the leaves cannot be cut into so many.

    >>> params = [jax.ShapeDtypeStruct((2, 3), "float32"), jax.ShapeDtypeStruct((6,), "float32")]
    >>> [[tuple(piece) for piece in each.pieces] for each in fragments_of(params, 2)]
    [[(0, 0, 2, True)], [(1, 0, 6, True)]]
    """
    if count == 1:
        return (Fragment(),)
    shapes = [tuple(jnp.shape(leaf)) for leaf in jax.tree.leaves(params)]
    cuts = Cuts(shapes, uncut)
    if count > cuts.runs:
        split = f", {len(uncut)} of them split there and so not cut" if uncut else ""
        raise ValueError(
            "outer must have no more fragments than the parameters can be cut into along "
            f"their leading axes, got {count} for {len(shapes)} leaves of {cuts.total:,} entries"
            f"{split}. Use fewer fragments."
        )
    pairs = itertools.pairwise(map(cuts.row_at, cuts.even(count)))
    pieces = [_pieces(begin, end, shapes) for begin, end in pairs]
    return tuple(Fragment(each, index, count) for index, each in enumerate(pieces))


def _pieces(
    begin: tuple[int, int], end: tuple[int, int], shapes: Sequence[tuple[int, ...]]
) -> tuple[Piece, ...]:
    """Return the rows from one cut to another."""
    found = []
    for leaf in range(begin[0], min(end[0] + 1, len(shapes))):
        rows = _rows(shapes[leaf])
        start = begin[1] if leaf == begin[0] else 0
        stop = end[1] if leaf == end[0] else rows
        if start < stop:
            found.append(Piece(leaf, start, stop, (start, stop) == (0, rows)))
    return tuple(found)


def _rows(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 1


def _dtype(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else jnp.result_type(x)


def shapes_of_fragments(outer: Any, params: Any) -> list[PyTree]:
    """Return the shapes of each fragment's arrays."""
    fragments = fragments_of(params, fragment_count(outer))
    return [fragment.shapes(params) for fragment in fragments]
