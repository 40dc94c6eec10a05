"""The sharded exchange: entries go to the owner of their block, who adds up and chooses again.

What a replica sends does not grow with the number of replicas: its k entries once, and the k/N of
its own part of the tree once to each.

Source: the idea is that of Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep
Learning" (Ok-Topk), arXiv:2201.07598, with shapes that are known while tracing.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrc.dgc import _collectives
from jrc.dgc._entries import BLOCK, NOWHERE, Entries, Space, moved
from jrc.dgc._exchanges.allgather import Arrived, Sent, not_read
from jrc.dgc._selectors.blocks import blocks_of
from jrc.dgc._selectors.top_k import GROUP
from jrc.dgc._wires import Wire


class Owners(NamedTuple):
    """Which replica owns which part of the tree.

    Attributes:
        edges: Of each owner its first entry among those that a replica sends, and the end.
        starts: Of each owner the position at which its part begins.
        blocks: Blocks of 65,536 positions that the largest part takes.
    """

    edges: tuple[int, ...]
    starts: tuple[int, ...]
    blocks: int

    @property
    def most(self) -> int:
        """Entries that one replica sends to one owner, at most."""
        return max(end - start for start, end in itertools.pairwise(self.edges))


def owners_of(space: Space, counts: tuple[int, ...], size: int, replicas: int) -> Owners:
    """Share a tree out: whole blocks in order, with about equally many entries to send.

    Args:
        space: The positions of all leaves.
        counts: Entries that a replica sends of each leaf.
        size: Entries of a block of the selector.
        replicas: N.

    Returns:
        The owners' parts; some may be empty where there are few blocks.
    """
    firsts, sent = [], []
    for start, leaf, k in zip(space.starts[:-1], space.sizes, counts, strict=True):
        blocks = blocks_of(leaf, k, size)
        firsts += [start + i * blocks.width * GROUP for i in range(len(blocks.counts))]
        sent += blocks.counts
    before = np.concatenate([[0], np.cumsum(sent)])
    cuts = np.searchsorted(before, before[-1] * np.arange(1, replicas) / replicas)
    cuts = [0, *(int(cut) for cut in cuts), len(sent)]
    places = [*firsts, space.starts[-1]]
    starts = [places[cut] for cut in cuts]
    widest = max(end - start for start, end in itertools.pairwise(starts))
    edges = tuple(int(before[cut]) for cut in cuts)
    return Owners(edges, tuple(starts[:-1]), -(-widest // BLOCK))


def sharded_words(owners: Owners, wire: Wire) -> int:
    """Words that a replica sends to each of the others, in both rounds together."""
    return 2 * wire.words(owners.most, owners.blocks)


def shard_entries(
    entries: Entries, owners: Owners, wire: Wire, axis: str | None
) -> tuple[Arrived, Sent]:
    """To the owners and, of what they add up, the largest back to all.

    Args:
        entries: What this replica sends, block by block.
        owners: Which part is whose.
        wire: The format.
        axis: The replica axis.

    Returns:
        What arrived, equal on every replica, and what became of this one's entries; `kept` is what
        it does not hand on as an owner: sums over the replicas, for its v.
    """
    most, blocks = owners.most, owners.blocks
    starts = jnp.asarray(owners.starts, jnp.uint32)
    parts = jax.vmap(wire.ordered)(_by_owner(entries, owners))
    rows = jax.vmap(lambda part: wire.encode(part, blocks))(parts)
    read = jax.vmap(lambda row: wire.decode(row, most, blocks))(rows).values
    there = moved(parts.positions, starts[:, None], blocks)
    left = Entries(not_read(parts.values, read).reshape(-1), there.reshape(-1))

    received = _collectives.swap(rows, axis)
    sums = _summed(jax.vmap(lambda row: wire.decode(row, most, blocks))(received))
    inside = sums.positions < np.uint32(blocks * BLOCK)
    largest = lax.top_k(jnp.where(inside, jnp.abs(sums.values), -1.0), most)[1]
    # In the order of positions, in which every format writes and reads.
    chosen = jnp.sort(largest)
    best = Entries(sums.values[chosen], sums.positions[chosen])
    words = wire.encode(best, blocks)
    lost = not_read(best.values, wire.decode(words, most, blocks).values)
    mine = starts[_collectives.rank(axis)]
    kept = Entries(sums.values.at[chosen].set(lost), moved(sums.positions, mine, blocks))
    gathered = _collectives.gather(words, axis)
    return Arrived(gathered, most, blocks, owners.starts, None), Sent(left, None, kept)


def _by_owner(entries: Entries, owners: Owners) -> Entries:
    """A row for each owner: positions within its part, and places behind it to fill up."""
    values, positions = [], []
    for (begin, end), start in zip(itertools.pairwise(owners.edges), owners.starts, strict=True):
        room = owners.most - (end - begin)
        values.append(jnp.pad(entries.values[begin:end], (0, room)))
        nowhere = NOWHERE - jnp.arange(room, dtype=jnp.uint32)
        here = entries.positions[begin:end] - np.uint32(start)
        positions.append(jnp.concatenate([here, nowhere]))
    return Entries(jnp.stack(values), jnp.stack(positions))


def _summed(rows: Entries) -> Entries:
    """The sum of all rows, in rank order, each position once; the rest stand behind the part."""
    flat = jax.tree.map(lambda x: x.reshape(-1), rows)
    positions, values = lax.sort((flat.positions, flat.values), num_keys=1, is_stable=True)
    fresh = jnp.concatenate([jnp.ones(1, bool), positions[1:] != positions[:-1]])
    place = jnp.cumsum(fresh, dtype=jnp.int32) - 1
    sums = jnp.zeros_like(values).at[place].add(values, indices_are_sorted=True)
    firsts = jnp.full(values.size, NOWHERE).at[place].set(positions, indices_are_sorted=True)
    return Entries(sums, firsts)
