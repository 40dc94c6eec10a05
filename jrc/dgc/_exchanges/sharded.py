"""The exchange `"sharded"`: entries go to the owner of their block, who adds up and selects.

What a replica sends does not grow with the number of replicas: its k entries once, and the k/N of
its own part of the tree once to each.

Source: the idea is that of Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep
Learning" (Ok-Topk), arXiv:2201.07598, with shapes that are known while tracing.
"""

import dataclasses
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrc.dgc._collectives import exchange_rows, gather, rank
from jrc.dgc._entries import BLOCK, NOWHERE, Entries, Space, shifted
from jrc.dgc._exchanges.protocol import Arrived, Sent, Transfer, rounded_away
from jrc.dgc._selectors import GROUP, Blocked, blocks_of


@dataclasses.dataclass(frozen=True)
class Sharded:
    """An all-to-all to the owners, and an all-gather of as many sums as one replica sent.

    Needs `selector=Blocked(...)`: every replica must send as many entries of each block. Sums that
    an owner does not send back stay in its v.
    """

    def words(self, transfer: Transfer) -> float:
        """Return the words that one replica sends to each of the others, in both rounds."""
        owners = _owners(transfer)
        return 2 * transfer.wire.words(owners.most, owners.blocks)

    def exchange(self, entries: Entries, transfer: Transfer) -> tuple[Arrived, Sent]:
        """Send entries to their owners and the largest sums back to all."""
        owners, wire, axis = _owners(transfer), transfer.wire, transfer.axis
        most, blocks = owners.most, owners.blocks
        starts = jnp.asarray(owners.starts, jnp.uint32)
        parts = jax.vmap(lambda part: wire.ordered(part))(_by_owner(entries, owners))
        rows = jax.vmap(lambda part: wire.encode(part, blocks))(parts)
        read = jax.vmap(lambda row: wire.decode(row, most, blocks))(rows).values
        there = shifted(parts.positions, starts[:, None], blocks)
        left = Entries(rounded_away(parts.values, read).reshape(-1), there.reshape(-1))

        received = exchange_rows(rows, axis)
        sums = _summed(jax.vmap(lambda row: wire.decode(row, most, blocks))(received))
        inside = sums.positions < np.uint32(blocks * BLOCK)
        largest = lax.top_k(jnp.where(inside, jnp.abs(sums.values), -1.0), most)[1]
        # In the order of positions, in which every format writes and reads.
        chosen = jnp.sort(largest)
        best = Entries(sums.values[chosen], sums.positions[chosen])
        words = wire.encode(best, blocks)
        lost = rounded_away(best.values, wire.decode(words, most, blocks).values)
        own = starts[rank(axis)]
        returned = Entries(sums.values.at[chosen].set(lost), shifted(sums.positions, own, blocks))
        arrived = Arrived(gather(words, axis), most, blocks, owners.starts, None)
        return arrived, Sent(left, None, returned)


class Owners(NamedTuple):
    """Which replica owns which part of the tree.

    Attributes:
        edges: For each owner the number of its first entry among those that a replica sends, and
            the end.
        starts: For each owner the position at which its part begins.
        blocks: Blocks of 65,536 positions that the largest part takes.
    """

    edges: tuple[int, ...]
    starts: tuple[int, ...]
    blocks: int

    @property
    def most(self) -> int:
        """The most entries that one replica sends to one owner."""
        return max(end - start for start, end in itertools.pairwise(self.edges))


def owners_of(space: Space, counts: tuple[int, ...], size: int, replicas: int) -> Owners:
    """Return which replica owns which blocks: about equally many entries to send for each.

    Args:
        space: The positions of all leaves.
        counts: Entries that a replica sends of each leaf.
        size: Entries of a block of the selector.
        replicas: N.

    Returns:
        The owners' parts; some may be empty where there are few blocks.
    """
    firsts: list[np.ndarray] = []
    sent: list[tuple[int, ...]] = []
    for start, leaf, k in zip(space.starts[:-1], space.sizes, counts, strict=True):
        blocks = blocks_of(leaf, k, size)
        firsts.append(start + np.arange(len(blocks.counts)) * (blocks.width * GROUP))
        sent.append(blocks.counts)
    before = np.concatenate([[0], np.cumsum(np.concatenate(sent))])
    cuts = np.searchsorted(before, before[-1] * np.arange(1, replicas) / replicas)
    cuts = [0, *(int(cut) for cut in cuts), before.size - 1]
    places = np.concatenate([*firsts, [space.starts[-1]]])
    starts = [int(places[cut]) for cut in cuts]
    widest = max(end - start for start, end in itertools.pairwise(starts))
    edges = tuple(int(before[cut]) for cut in cuts)
    return Owners(edges, tuple(starts[:-1]), -(-widest // BLOCK))


def _owners(transfer: Transfer) -> Owners:
    selector = transfer.selector
    assert isinstance(selector, Blocked)
    return owners_of(transfer.space, transfer.counts, selector.size, transfer.replicas)


def _by_owner(entries: Entries, owners: Owners) -> Entries:
    """Return a row for each owner: positions within its part, short rows filled up behind it."""
    values, positions = [], []
    for (begin, end), start in zip(itertools.pairwise(owners.edges), owners.starts, strict=True):
        missing = owners.most - (end - begin)
        values.append(jnp.pad(entries.values[begin:end], (0, missing)))
        nowhere = NOWHERE - jnp.arange(missing, dtype=jnp.uint32)
        here = entries.positions[begin:end] - np.uint32(start)
        positions.append(jnp.concatenate([here, nowhere]))
    return Entries(jnp.stack(values), jnp.stack(positions))


def _summed(rows: Entries) -> Entries:
    """Return the sum of all rows, in rank order, each position once, the rest behind the part."""
    flat = jax.tree.map(lambda x: x.reshape(-1), rows)
    positions, values = lax.sort((flat.positions, flat.values), num_keys=1, is_stable=True)
    fresh = jnp.concatenate([jnp.ones(1, bool), positions[1:] != positions[:-1]])
    place = jnp.cumsum(fresh, dtype=jnp.int32) - 1
    sums = jnp.zeros_like(values).at[place].add(values, indices_are_sorted=True)
    firsts = jnp.full(values.size, NOWHERE).at[place].set(positions, indices_are_sorted=True)
    return Entries(sums, firsts)
