"""What an exchange is, what it is given, and what it returns."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp

from jrc._typing import AnyArray, Array, Float, UInt
from jrc.dgc._entries import Entries, Space
from jrc.dgc._selectors import Selector
from jrc.dgc._wires import Wire


class Transfer(NamedTuple):
    """What is known while tracing of the entries that one step sends.

    Attributes:
        space: The numbering of the entries of all leaves.
        counts: Entries that each replica sends of each leaf.
        selector: How they are chosen.
        wire: How they are written.
        replicas: N.
        axis: The replica axis; `None` is one replica.
    """

    space: Space
    counts: tuple[int, ...]
    selector: Selector
    wire: Wire
    replicas: int
    axis: str | None

    @property
    def counts_by_leaf(self) -> tuple[int, ...] | None:
        """`counts` if entries come leaf after leaf; `None` if the selector mixes leaves."""
        return self.counts if self.selector.by_leaf else None


class Arrived(NamedTuple):
    """What every replica has after an exchange, equal on all of them.

    Attributes:
        words: uint32[rows, words]; several rows may hold entries of one position, one row does not.
        count: Entries in each row.
        blocks: Blocks of 65,536 positions that a row covers.
        starts: Of each row, the position in the space at which its first block begins.
        counts: Entries of each leaf in a row, leaf after leaf; `None` if they are mixed.
    """

    words: UInt[Array, "rows words"]
    count: int
    blocks: int
    starts: tuple[int, ...]
    counts: tuple[int, ...] | None


class Sent(NamedTuple):
    """What an exchange leaves in the state of this replica.

    Attributes:
        left: What v keeps at the positions that were sent: zero, or what the wire format rounded
            away. Its positions must be unique, but for those of no leaf.
        counts: How many of `left` belong to each leaf, leaf after leaf; `None` if they are mixed.
        returned: Entries to add to v after that, of any leaves, at unique positions; `None` if
            there are none.
    """

    left: Entries
    counts: tuple[int, ...] | None
    returned: Entries | None


@runtime_checkable
class EntryExchange(Protocol):
    """An exchange of entries with their positions. Any object with these methods works.

    The object must be hashable and its methods traceable. Every replica calls `exchange` in the
    same step, so it may use collectives.
    """

    def words(self, transfer: Transfer) -> float:
        """Return the 32-bit words that one replica sends to each of the others, on average."""
        ...

    def exchange(self, entries: Entries, transfer: Transfer) -> tuple[Arrived, Sent]:
        """Send this replica's entries to the others.

        Args:
            entries: `sum(transfer.counts)` entries in the order of the selector; all zero if the
                step is skipped.
            transfer: What is known of them while tracing.

        Returns:
            What every replica has, whose sum over the rows divided by N is the direction, and what
            this replica keeps.
        """
        ...


@runtime_checkable
class TensorExchange(Protocol):
    """An exchange of whole tensors, zero where nothing is sent.

    Any object with these methods works. It must be hashable and its methods traceable. The
    selector and the wire format have no effect: entries are chosen by a threshold, so that all
    sparsity levels share one program.
    """

    def words(self, transfer: Transfer) -> float:
        """Return the 32-bit words that one replica sends to each of the others, on average."""
        ...

    def mean(self, tensors: Sequence[Float[Array, "..."]], axis: str | None) -> list[Array]:
        """Return the means of float32 tensors over the replicas, equal on every replica."""
        ...


Exchange = EntryExchange | TensorExchange


def encoded(entries: Entries, transfer: Transfer) -> tuple[UInt[Array, " words"], Sent]:
    """Return entries in the transfer's wire format, and what the format leaves behind.

    Args:
        entries: What this replica sends.
        transfer: What is known of them while tracing.

    Returns:
        uint32 words that `transfer.wire` decodes, and the `Sent` of an exchange that delivers all.

    Raises:
        TypeError: When a wire format returns no `Entries` where it must.
        ValueError: When it writes another number of words than its `words` returns.
    """
    wire, blocks = transfer.wire, transfer.space.blocks
    entries = wire.ordered(entries)
    words = wire.encode(entries, blocks)
    read = wire.decode(words, entries.values.size, blocks).values
    left = Entries(rounded_away(entries.values, read), entries.positions)
    return words, Sent(left, transfer.counts_by_leaf, None)


def rounded_away(
    sent: Float[AnyArray, "*shape"], read: Float[AnyArray, "*shape"]
) -> Float[Array, "*shape"]:
    """Return what receivers do not read of the values that were sent."""
    # Not by subtraction alone: infinity minus infinity is NaN.
    return jnp.where(sent == read, 0.0, sent - read)
