"""What selectors run on accelerators: the same entries as on a CPU, without a sort.

All of the k largest entries lie in the k rows of neighbours with the largest maxima. These rows are
found and gathered, and the largest are chosen among their entries, both by counting.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrc._typing import Array, Float, Int, Shaped
from jrc.dgc._collectives import as_local
from jrc.dgc._entries import Entries, Space
from jrc.dgc._selectors.counting import AT_ONCE, BRANCHES, largest_each, places_of
from jrc.dgc._selectors.protocol import Leaves, entries_at
from jrc.dgc._selectors.threshold import magnitude_bits

FEW = 4
"""Rows are gathered if their entries are at most one in so many; else all are candidates."""


class Cut(NamedTuple):
    """How a flat leaf is cut for a choice.

    Attributes:
        size: Entries of the leaf.
        block: Entries of a block; the last block may be short.
        counts: Entries to choose of each block.
        width: Of each of the rows with the largest maxima only the largest entry is chosen, rows
            of this many entries; `None` to choose the largest entries of the block.
    """

    size: int
    block: int
    counts: tuple[int, ...]
    width: int | None = None

    @property
    def most(self) -> int:
        """The most entries that are chosen of a block."""
        return max(self.counts)


class How(NamedTuple):
    """How leaves are gone through.

    Attributes:
        width: Entries of a row.
        together: Whether equal leaves are counted together, and not one after the other.
    """

    width: int
    together: bool


TPU = How(128, together=False)
"""Rows as wide as a vector register, which makes candidates many: a leaf's at a time."""

GPU = How(32, together=True)
"""Rows as wide as a warp; each pass over a leaf of its own would cost the start of a kernel."""


def whole(size: int, k: int) -> Cut:
    """Return a leaf that is one block."""
    return Cut(size, size, (k,))


def by_platform(
    leaves: Leaves, cpu: Callable[[Leaves], Entries], counted: Callable[[Leaves, How], Entries]
) -> Entries:
    """Return what is chosen on the platform that the program is lowered for.

    Args:
        leaves: The accumulated gradients.
        cpu: The choice with sorts, for CPUs.
        counted: The same choice by counting, for accelerators.
    """
    # Branches must agree on what varies: indices of all entries of a leaf are constants.
    axes = sorted({name for leaf in leaves for name in jax.typeof(leaf).mat.varying})

    def typed(entries: Entries) -> Entries:
        return jax.tree.map(lambda x: reduce(as_local, axes, x), entries)

    return lax.platform_dependent(
        *leaves,
        cpu=lambda *leaves: typed(cpu(leaves)),
        tpu=lambda *leaves: typed(counted(leaves, TPU)),
        default=lambda *leaves: typed(counted(leaves, GPU)),
    )


def chosen_in_cuts(leaves: Leaves, cuts: Sequence[Cut], space: Space, how: How) -> Entries:
    """Return the entries of `largest_in_cuts`."""
    return entries_at(leaves, largest_in_cuts(leaves, cuts, how), space)


def largest_in_cuts(leaves: Leaves, cuts: Sequence[Cut], how: How) -> list[Int[Array, " _k"]]:
    """Return the indices of the entries of largest magnitude of each block of each leaf.

    Args:
        leaves: The accumulated gradients.
        cuts: For each leaf its blocks, and how many entries of each are chosen.
        how: How leaves are gone through.

    Returns:
        For each leaf unique int32 indices, ascending; ties go to the lowest index.
    """
    groups: dict[Any, list[int]] = {}
    for place, cut in enumerate(cuts):
        # Where all entries are candidates, those of several leaves would be in memory at once.
        together = how.together and not _takes_all(cut, row_width(cut, how))
        groups.setdefault(cut if together else place, []).append(place)
    found: list[Any] = [None] * len(cuts)
    before = None
    for group in groups.values():
        cut = cuts[group[0]]
        rows = _largest([leaves[place] for place in group], before, cut, row_width(cut, how))
        for place, row in zip(group, rows, strict=True):
            found[place] = row
        before = None if len(group) > 1 else rows[0, :1]
    return found


# Traced once for all leaves that are cut alike.
@partial(jax.jit, static_argnums=(2, 3))
def _largest(leaves: Leaves, before: Array | None, cut: Cut, width: int) -> Array:
    """Return indices of leaves that are cut alike, int32[leaves, k], after others are chosen."""
    n, k = len(leaves), sum(cut.counts)
    if k == cut.size:
        return jnp.tile(jnp.arange(k, dtype=jnp.int32), (n, 1))
    bits, firsts = _candidates(leaves, before, cut, width)
    if cut.width is not None:
        at = lax.argmax(bits.reshape(n, k, width), 2, jnp.int32)
        return firsts.reshape(n, k) + at
    mask = largest_each(bits, cut.counts * n)
    # Where all entries are candidates, many may be wanted: as many at a time as fill a leaf.
    at_once = max(cut.size // BRANCHES, AT_ONCE) if _takes_all(cut, width) else None
    place = places_of(mask.reshape(-1), n * k, at_once)
    return (firsts[place // width] + place % width).reshape(n, k)


def row_width(cut: Cut, how: How) -> int:
    """Return the entries of a row: as `how` has it, but for blocks that such rows do not fill.

    Rows of 128 entries for blocks of 16 would be eight times as large as the leaf.

    >>> row_width(Cut(4096, 16, (4,) * 256), TPU), row_width(Cut(4096, 4096, (4,)), TPU)
    (16, 128)
    >>> row_width(Cut(4096, 144, (4,) * 29), TPU)
    72
    """
    if cut.width is not None:
        return cut.width
    rows = -(-cut.block // how.width)
    return -(-cut.block // rows)


def _takes_all(cut: Cut, width: int) -> bool:
    """Return whether all entries of a block are candidates."""
    return cut.width is None and FEW * cut.most * width > cut.block


def _candidates(
    leaves: Leaves, before: Array | None, cut: Cut, width: int
) -> tuple[Int[Array, "blocks m"], Int[Array, " rows"]]:
    """Return magnitudes as integers, by block, -1 where there is none, and where each row starts.

    All rows, or as many of each block as entries are chosen, those with the largest maxima.
    """
    blocks = len(cut.counts)
    if _takes_all(cut, width):
        if before is not None:
            leaves, _ = lax.optimization_barrier((leaves, before))
        bits = jnp.concatenate([_rows_of(leaf, cut, width, -1) for leaf in leaves])
        block = jnp.arange(blocks, dtype=jnp.int32)[:, None] * cut.block
        firsts = block + jnp.arange(bits.shape[1], dtype=jnp.int32)[None] * width
        return bits.reshape(bits.shape[0], -1), jnp.tile(firsts.reshape(-1), len(leaves))
    starts = _starts(leaves, cut, width)
    if before is not None:
        # Else XLA gathers the rows of all leaves at once.
        starts, _ = lax.optimization_barrier((starts, before))
    rows = [
        _rows_at(leaf, each, width, cut.block) for leaf, each in zip(leaves, starts, strict=True)
    ]
    bits = [jnp.where(here, magnitude_bits(row), -1) for row, _, here in rows]
    shape = len(leaves) * blocks, cut.most * width
    return jnp.concatenate(bits).reshape(shape), jnp.concatenate([first for _, first, _ in rows])


def _starts(leaves: Leaves, cut: Cut, width: int) -> Int[Array, "leaves rows"]:
    """Return where the rows with the largest maxima start, as many in each block."""
    maxima = jnp.concatenate([_maxima(leaf, cut, width) for leaf in leaves])
    mask = largest_each(maxima, [cut.most] * maxima.shape[0])
    row = places_of(mask.reshape(-1), maxima.shape[0] * cut.most)
    block, within = row // maxima.shape[1] % len(cut.counts), row % maxima.shape[1]
    return (block * cut.block + within * width).reshape(len(leaves), -1)


def _maxima(leaf: Array, cut: Cut, width: int) -> Int[Array, "blocks rows"]:
    """Return the largest magnitude of each row, as integers; rows of padding have zero."""
    return jnp.max(_rows_of(leaf, cut, width, 0), axis=2)


def _rows_of(leaf: Array, cut: Cut, width: int, fill: int) -> Int[Array, "blocks rows width"]:
    """Return the magnitudes of all rows, as integers; short blocks and rows are filled up."""
    blocks, rows = len(cut.counts), -(-cut.block // width)
    bits = magnitude_bits(leaf)
    if missing := blocks * cut.block - cut.size:
        bits = jnp.pad(bits, (0, missing), constant_values=fill)
    if missing := rows * width - cut.block:
        bits = bits.reshape(blocks, cut.block)
        bits = jnp.pad(bits, ((0, 0), (0, missing)), constant_values=fill)
    return bits.reshape(blocks, rows, width)


def _rows_at(
    leaf: Array, starts: Int[Array, " m"], width: int, block: int
) -> tuple[Float[Array, "m width"], Int[Array, " m"], Shaped[Array, "m width"]]:
    """Return rows, where they start, and which of their entries belong to them.

    A row that would reach behind the end of the leaf starts earlier.
    """
    leaf = jnp.pad(leaf, (0, max(0, width - leaf.size)))
    firsts = jnp.clip(starts, 0, leaf.size - width)
    rows = jax.vmap(lambda at: lax.dynamic_slice(leaf, (at,), (width,)))(firsts)
    within = (firsts - starts)[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    length = jnp.minimum(width, block - starts % block)
    return rows, firsts, (within >= 0) & (within < length[:, None])


@partial(jax.jit, static_argnums=(1, 2, 3))
def chosen_of_all(leaves: Leaves, k: int, space: Space, how: How) -> Entries:
    """Return the k entries of largest magnitude of all leaves together.

    Args:
        leaves: The accumulated gradients.
        k: Entries to choose.
        space: The numbering of the leaves' entries.
        how: How leaves are gone through.

    Returns:
        The entries, in the order of their positions; ties go to the lowest position.
    """
    width = how.width
    maxima = [_maxima(leaf, whole(leaf.size, k), width)[0] for leaf in leaves]
    edges = np.cumsum([0, *(each.size for each in maxima)])
    rows = jnp.arange(edges[-1], dtype=jnp.int32)
    if k < edges[-1]:
        mask = largest_each(jnp.concatenate(maxima)[None], [k])
        rows = places_of(mask[0], k)
    values = jnp.zeros_like(leaves[0], shape=(rows.size, width))
    firsts, here = jnp.uint32(0), False
    for place, leaf in enumerate(leaves):
        # One leaf's rows after the other's, or XLA gathers them all at once.
        rows, values = lax.optimization_barrier((rows, values))
        own = (rows >= edges[place]) & (rows < edges[place + 1])
        starts = jnp.where(own, rows - edges[place], 0) * width
        found, first, inside = _rows_at(leaf, starts, width, leaf.size)
        values = jnp.where(own[:, None], found, values)
        firsts = jnp.where(own, space.positions(place, first), firsts)
        here |= own[:, None] & inside
    bits = jnp.where(here, magnitude_bits(values), -1).reshape(1, -1)
    at = places_of(largest_each(bits, [k])[0], k)
    row, lane = at // width, at % width
    return Entries(values[row, lane], firsts[row] + lane.astype(jnp.uint32))
