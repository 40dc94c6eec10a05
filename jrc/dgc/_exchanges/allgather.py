"""The exchange `"allgather"`: every replica's entries go to every replica."""

import dataclasses

from jrc.dgc._collectives import gather
from jrc.dgc._entries import Entries
from jrc.dgc._exchanges.protocol import Arrived, Sent, Transfer, encoded


@dataclasses.dataclass(frozen=True)
class AllGather:
    """One all-gather of the entries: `(N - 1) k` of them are sent by each replica."""

    def words(self, transfer: Transfer) -> float:
        """Return the words that one replica sends to each of the others: its payload."""
        return transfer.wire.words(sum(transfer.counts), transfer.space.blocks)

    def exchange(self, entries: Entries, transfer: Transfer) -> tuple[Arrived, Sent]:
        """Gather the entries of all replicas."""
        words, sent = encoded(entries, transfer)
        rows = gather(words, transfer.axis)
        starts = (0,) * rows.shape[0]
        count, blocks = entries.values.size, transfer.space.blocks
        return Arrived(rows, count, blocks, starts, transfer.counts_by_leaf), sent
