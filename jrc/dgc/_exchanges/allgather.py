"""The exchanges: a mean of whole tensors, and a gather of the entries that each replica sends."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrc._typing import Array, Float, Int
from jrc.dgc import _collectives
from jrc.dgc._entries import Entries, Space, moved
from jrc.dgc._wires import Wire


class Arrived(NamedTuple):
    """What all replicas know after an exchange.

    Attributes:
        words: uint32[rows, words]; rows may hold entries of the same positions, one row does not.
        count: Entries in each row.
        blocks: Blocks of the space that the rows' positions count in.
        starts: Of each row, the position that its own first one has in the space of all leaves.
        counts: How many entries belong to each leaf, in order; `None` where that is not known.
    """

    words: Int[Array, "rows words"]
    count: int
    blocks: int
    starts: tuple[int, ...]
    counts: tuple[int, ...] | None


class Sent(NamedTuple):
    """What became of this replica's entries.

    Attributes:
        left: What stays behind where entries were sent: nothing, or what a short format lost.
        counts: How many of these belong to each leaf, in order; `None` where that is not known.
        kept: What comes back to this replica to be kept, of whatever leaf; `None` if nothing.
    """

    left: Entries
    counts: tuple[int, ...] | None
    kept: Entries | None


AT: dict[str, Any] = {"mode": "drop", "unique_indices": True, "wrap_negative_indices": False}
"""How entries are written: each once, those of no leaf not at all."""


def dense_mean(tensors: Sequence[Array], axis: str | None) -> list[Array]:
    """Means of float32 tensors over the replicas, in one all-reduce.

    Args:
        tensors: Local ones, of any shapes.
        axis: The replica axis.

    Returns:
        The means, equal on every replica.
    """
    if not tensors or axis is None:
        return list(tensors)
    flat = jnp.concatenate([tensor.reshape(-1) for tensor in tensors])
    mean = _collectives.total(flat, axis) / _collectives.num_replicas(axis)
    means, start = [], 0
    for tensor in tensors:
        means.append(mean[start : start + tensor.size].reshape(tensor.shape))
        start += tensor.size
    return means


def not_read(wanted: Float[Array, " k"], read: Float[Array, " k"]) -> Float[Array, " k"]:
    """What others did not read of what was meant: nothing, or what a short format lost."""
    # Not by subtraction alone, for infinity less infinity is no number.
    return jnp.where(wanted == read, 0.0, wanted - read)


def gather_entries(
    entries: Entries, space: Space, counts: tuple[int, ...] | None, wire: Wire, axis: str | None
) -> tuple[Arrived, Sent]:
    """Every replica's entries to every replica, in one all-gather.

    Args:
        entries: What this replica sends.
        space: The positions of all leaves.
        counts: Entries of each leaf, where that is known and entries are in their order.
        wire: The format.
        axis: The replica axis.

    Returns:
        What arrived, equal on every replica, and what became of this one's entries.
    """
    count = entries.values.size
    entries = wire.ordered(entries)
    words = wire.encode(entries, space.blocks)
    rows = _collectives.gather(words, axis)
    arrived = Arrived(rows, count, space.blocks, (0,) * rows.shape[0], counts)
    read = wire.decode(words, count, space.blocks).values
    left = Entries(not_read(entries.values, read), entries.positions)
    return arrived, Sent(left, counts, None)


def mean_onto(
    targets: Sequence[Array],
    arrived: Arrived,
    space: Space,
    wire: Wire,
    scale: Array,
    replicas: int,
) -> list[Array]:
    """Add the mean of what arrived, times a scale, to the leaves.

    Row after row, in rank order: within one row positions are unique, so no two additions race and
    the order of the sums is the same everywhere.

    Args:
        targets: One flat array for each leaf.
        arrived: From an exchange.
        space: The positions of all leaves.
        wire: The format.
        scale: float32 scalar.
        replicas: N.

    Returns:
        The leaves, of which only entries that arrived were touched.
    """
    starts = jnp.asarray(arrived.starts, jnp.uint32)

    def add(row: Array, totals: list[Array]) -> list[Array]:
        words = jax.lax.dynamic_index_in_dim(arrived.words, row, keepdims=False)
        entries = wire.decode(words, arrived.count, arrived.blocks)
        entries = Entries(
            # A mean of few entries costs less than a division of the whole tensor.
            scale * (entries.values / replicas),
            moved(entries.positions, starts[row], arrived.blocks),
        )
        return [
            total.at[leaf.indices].add(leaf.values, **AT)
            for total, leaf in zip(totals, space.leaves(entries, arrived.counts), strict=True)
        ]

    return jax.lax.fori_loop(0, arrived.words.shape[0], add, list(targets))
