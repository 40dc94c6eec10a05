"""What selectors run on accelerators: the same entries as on a CPU, without a sort.

All of the k largest entries lie in the k rows of neighbours with the largest maxima. These rows are
gathered, and the largest are chosen among their entries, both by counting.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrc._typing import Array, Float, Int
from jrc.dgc._entries import Entries, Space
from jrc.dgc._selectors.counting import largest_each, places_of
from jrc.dgc._selectors.protocol import Leaves, entries_at
from jrc.dgc._selectors.threshold import magnitude_bits

TPU_WIDTH = 128
"""Entries of a row on TPUs: the lanes of a vector register."""

WIDTH = 32
"""Entries of a row elsewhere: those that the threads of a GPU's warp read together."""

FEW = 4
"""Rows are gathered if their entries are at most one in so many; else all are candidates."""


class Cut(NamedTuple):
    """How a flat leaf is cut for a choice.

    Attributes:
        size: Entries of the leaf.
        block: Entries of a block; the last block may be short.
        counts: Entries to choose of each block.
    """

    size: int
    block: int
    counts: tuple[int, ...]

    @property
    def most(self) -> int:
        """The most entries that are chosen of a block."""
        return max(self.counts)


class Rows(NamedTuple):
    """Entries of a row of a leaf, and the number of rows to choose."""

    width: int
    count: int


def whole(size: int, k: int) -> Cut:
    """Return a leaf that is one block."""
    return Cut(size, size, (k,))


def by_platform(
    leaves: Sequence[Array],
    cpu: Callable[[Sequence[Array]], Entries],
    chosen: Callable[[Sequence[Array], int, bool], Entries],
) -> Entries:
    """Return what is chosen on the platform that the program is lowered for.

    Args:
        leaves: The accumulated gradients.
        cpu: The choice on CPUs, with sorts.
        chosen: The choice on accelerators: `(leaves, width of a row, whether leaves are counted
            together)`. A GPU starts a kernel for each pass over each leaf; a TPU has no such cost,
            and less memory is needed leaf by leaf.
    """
    return lax.platform_dependent(
        *leaves,
        cpu=lambda *leaves: cpu(leaves),
        tpu=lambda *leaves: chosen(leaves, TPU_WIDTH, False),
        default=lambda *leaves: chosen(leaves, WIDTH, True),
    )


def chosen_in_cuts(
    leaves: Sequence[Array], cuts: Sequence[Cut], space: Space, width: int, together: bool
) -> Entries:
    """Return the entries of `largest_in_cuts`."""
    return entries_at(leaves, largest_in_cuts(leaves, cuts, width, together), space)


def largest_in_cuts(
    leaves: Sequence[Float[Array, " _n"]], cuts: Sequence[Cut], width: int, together: bool
) -> list[Int[Array, " _k"]]:
    """Return the indices of the entries of largest magnitude of each block of each leaf.

    Args:
        leaves: float32.
        cuts: For each leaf its blocks, and how many entries of each are chosen.
        width: Entries of a row.
        together: Whether all leaves are counted in one loop.

    Returns:
        For each leaf unique int32 indices, ascending; ties go to the lowest index.
    """
    return _in_runs(leaves, cuts, together, lambda *run: _largest(*run, width))


def largest_of_rows(
    leaves: Sequence[Float[Array, " _n"]], rows: Sequence[Rows], together: bool
) -> list[Int[Array, " _k"]]:
    """Return the index of the largest entry of each of the k rows with the largest maxima.

    Args:
        leaves: float32.
        rows: For each leaf the entries of a row, and k, less than the number of rows.
        together: Whether all leaves are counted in one loop.

    Returns:
        For each leaf unique int32 indices, ascending; ties go to the lowest index.
    """

    def largest(leaves: Sequence[Array], rows: Sequence[Rows]) -> list[Array]:
        cuts = [whole(leaf.size, each.count) for leaf, each in zip(leaves, rows, strict=True)]
        starts = _starts(leaves, cuts, [each.width for each in rows])
        return [_largest_of_each(*each) for each in zip(leaves, starts, rows, strict=True)]

    return _in_runs(leaves, rows, together, largest)


def _largest_of_each(leaf: Array, starts: Array, rows: Rows) -> Int[Array, " k"]:
    found, firsts, here = _rows_at(leaf, starts, rows.width, leaf.size)
    bits = jnp.where(here, magnitude_bits(found), -1)
    return firsts + lax.argmax(bits, 1, jnp.int32)


def _in_runs(
    leaves: Sequence[Array],
    how: Sequence[Any],
    together: bool,
    choose: Callable[[Sequence[Array], Sequence[Any]], list[Array]],
) -> list[Array]:
    """Return what is chosen of all leaves at once, or of one after the other."""
    if together:
        return choose(leaves, how)
    return [choose([leaf], [each])[0] for leaf, each in zip(leaves, how, strict=True)]


def _largest(leaves: Sequence[Array], cuts: Sequence[Cut], width: int) -> list[Array]:
    few = [place for place, cut in enumerate(cuts) if FEW * cut.most * width <= cut.block]
    starts: list[Array | None] = [None] * len(cuts)
    found = _starts([leaves[i] for i in few], [cuts[i] for i in few], [width] * len(few))
    for place, start in zip(few, found, strict=True):
        starts[place] = start
    candidates = [
        _candidates(leaf, cut, start, width)
        for leaf, cut, start in zip(leaves, cuts, starts, strict=True)
    ]
    masks = largest_each([bits for bits, _ in candidates], [np.asarray(c.counts) for c in cuts])
    return [
        _indices(mask, firsts, sum(cut.counts))
        for mask, (_, firsts), cut in zip(masks, candidates, cuts, strict=True)
    ]


def _starts(
    leaves: Sequence[Array], cuts: Sequence[Cut], widths: Sequence[int]
) -> list[Int[Array, " _rows"]]:
    """Return where the rows with the largest maxima start, as many in each block."""
    if not leaves:
        return []
    maxima = [_maxima(*each) for each in zip(leaves, cuts, widths, strict=True)]
    masks = largest_each(maxima, [np.full(len(cut.counts), cut.most) for cut in cuts])
    out = []
    for cut, width, mask in zip(cuts, widths, masks, strict=True):
        row = places_of(mask.reshape(-1), len(cut.counts) * cut.most)
        block, within = row // mask.shape[1], row % mask.shape[1]
        out.append(block * cut.block + within * width)
    return out


def _maxima(leaf: Array, cut: Cut, width: int) -> Int[Array, "blocks rows"]:
    """Return the largest magnitude of each row, as integers; rows of padding have zero."""
    return jnp.max(_blocks(leaf, cut, width, 0), axis=2)


def _blocks(leaf: Array, cut: Cut, width: int, fill: int) -> Int[Array, "blocks rows width"]:
    """Return magnitudes as integers, a row of blocks of rows, filled up."""
    blocks, rows = len(cut.counts), -(-cut.block // width)
    bits = magnitude_bits(leaf)
    if missing := blocks * cut.block - cut.size:
        bits = jnp.pad(bits, (0, missing), constant_values=fill)
    if missing := rows * width - cut.block:
        bits = bits.reshape(blocks, cut.block)
        bits = jnp.pad(bits, ((0, 0), (0, missing)), constant_values=fill)
    return bits.reshape(blocks, rows, width)


def _candidates(leaf: Array, cut: Cut, starts: Array | None, width: int) -> tuple[Array, Array]:
    """Return magnitudes of candidates by block, -1 where there is none, and where rows start."""
    blocks = len(cut.counts)
    if starts is None:
        bits = _blocks(leaf, cut, width, -1)
        block = jnp.arange(blocks, dtype=jnp.int32)[:, None] * cut.block
        firsts = block + jnp.arange(bits.shape[1], dtype=jnp.int32)[None] * width
        return bits.reshape(blocks, -1), firsts.reshape(-1)
    rows, firsts, here = _rows_at(leaf, starts, width, cut.block)
    return jnp.where(here, magnitude_bits(rows), -1).reshape(blocks, -1), firsts


def _rows_at(
    leaf: Array, starts: Int[Array, " m"], width: int, block: int
) -> tuple[Float[Array, "m width"], Int[Array, " m"], Array]:
    """Return rows, where they start, and which of their entries belong to them.

    A row that would reach behind the end of the leaf starts earlier.
    """
    leaf = jnp.pad(leaf, (0, max(0, width - leaf.size)))
    firsts = jnp.clip(starts, 0, leaf.size - width)
    rows = jax.vmap(lambda at: lax.dynamic_slice(leaf, (at,), (width,)))(firsts)
    within = (firsts - starts)[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    length = jnp.minimum(width, block - starts % block)
    return rows, firsts, (within >= 0) & (within < length[:, None])


def _indices(mask: Array, firsts: Int[Array, " rows"], k: int) -> Int[Array, " k"]:
    """Return the indices of a mask's entries in the leaf."""
    width = mask.size // firsts.size
    place = places_of(mask.reshape(-1), k)
    return firsts[place // width] + place % width


def chosen_of_all(leaves: Leaves, k: int, space: Space, width: int) -> Entries:
    """Return the k entries of largest magnitude of all leaves together."""
    cuts = [whole(leaf.size, k) for leaf in leaves]
    maxima = [_maxima(leaf, cut, width)[0] for leaf, cut in zip(leaves, cuts, strict=True)]
    edges = np.cumsum([0, *(each.size for each in maxima)])
    rows = jnp.arange(edges[-1], dtype=jnp.int32)
    if k < edges[-1]:
        (mask,) = largest_each([jnp.concatenate(maxima)[None]], [np.asarray([k])])
        rows = places_of(mask[0], k)
    values, firsts, here = jnp.float32(0), jnp.uint32(0), False
    for place, leaf in enumerate(leaves):
        own = (rows >= edges[place]) & (rows < edges[place + 1])
        starts = jnp.where(own, rows - edges[place], 0) * width
        found, first, inside = _rows_at(leaf, starts, width, leaf.size)
        values = jnp.where(own[:, None], found, values)
        firsts = jnp.where(own, space.positions(place, first), firsts)
        here |= own[:, None] & inside
    bits = jnp.where(here, magnitude_bits(values), -1)
    (mask,) = largest_each([bits.reshape(1, -1)], [np.asarray([k])])
    at = places_of(mask[0], k)
    return Entries(
        values[at // width, at % width], firsts[at // width] + (at % width).astype("uint32")
    )
