"""What an exchange returns, after a check: a user's own may return anything."""

from collections.abc import Sequence

from jrc._typing import Array, Float
from jrc._validate import finite_number, whole_number
from jrc.dgc._check_own_objects import check_array, check_counts, check_entries, check_kind
from jrc.dgc._entries import Entries
from jrc.dgc._exchanges.protocol import (
    Arrived,
    EntryExchange,
    Exchange,
    Sent,
    TensorExchange,
    Transfer,
)
from jrc.dgc._wires import words_by

_REMEDY = "Return (Arrived, Sent), as jrc.dgc.AllGather does with jrc.dgc.encoded."


def words_of(exchange: Exchange, transfer: Transfer) -> float:
    """Return the words that an exchange sends to each other replica.

    Raises:
        TypeError: If that is no real number.
        ValueError: If it is negative or not finite.
    """
    remedy = "Return the 32-bit words that one replica sends to each of the others."
    return finite_number(exchange.words(transfer), "exchange.words(...)", remedy=remedy)


def exchanged_by(
    exchange: EntryExchange, entries: Entries, transfer: Transfer
) -> tuple[Arrived, Sent]:
    """Return what every replica has after an exchange of entries, and what this one keeps.

    Raises:
        TypeError: If that is not a pair of `Arrived` and `Sent`.
        ValueError: If a shape, a dtype or a count in them is wrong.
    """
    out = exchange.exchange(entries, transfer)
    if not isinstance(out, tuple) or len(out) != 2:
        raise TypeError(
            "exchange.exchange(...) must be a pair (Arrived, Sent), got "
            f"{type(out).__name__} from {exchange!r}. {_REMEDY}"
        )
    arrived, sent = out
    check_kind(arrived, Arrived, "exchange.exchange(...)[0]", exchange, _REMEDY)
    check_kind(sent, Sent, "exchange.exchange(...)[1]", exchange, _REMEDY)
    _check_arrived(arrived, transfer, exchange)
    _check_sent(sent, transfer, exchange)
    return arrived, sent


def _check_arrived(arrived: Arrived, transfer: Transfer, exchange: EntryExchange) -> None:
    count = whole_number(arrived.count, "Arrived.count", least=0, remedy=_REMEDY)
    blocks = whole_number(arrived.blocks, "Arrived.blocks", least=0, remedy=_REMEDY)
    if not isinstance(arrived.starts, Sequence):
        raise TypeError(
            "Arrived.starts must be a sequence of positions, one for each row, got "
            f"{type(arrived.starts).__name__} from {exchange!r}. {_REMEDY}"
        )
    shape = (len(arrived.starts), words_by(transfer.wire, count, blocks))
    check_array(arrived.words, shape, "uint32", "Arrived.words", exchange, _REMEDY)
    leaves = len(transfer.counts)
    check_counts(arrived.counts, leaves, count, "Arrived.counts", exchange, _REMEDY)


def _check_sent(sent: Sent, transfer: Transfer, exchange: EntryExchange) -> None:
    check_entries(sent.left, None, "Sent.left", exchange, _REMEDY)
    leaves, size = len(transfer.counts), sent.left.values.size
    check_counts(sent.counts, leaves, size, "Sent.counts", exchange, _REMEDY)
    if sent.returned is not None:
        check_entries(sent.returned, None, "Sent.returned", exchange, _REMEDY)


def mean_by(
    exchange: TensorExchange, tensors: Sequence[Float[Array, "..."]], axis: str | None
) -> list[Float[Array, "..."]]:
    """Return the means of tensors over the replicas.

    Raises:
        TypeError: If that is not a list of as many tensors.
        ValueError: If one of them has another shape or dtype.
    """
    means = exchange.mean(tensors, axis)
    remedy = "Return the mean of each tensor over the replicas, in their order."
    is_list = isinstance(means, list | tuple)
    if not is_list or len(means) != len(tensors):
        got = f"{type(means).__name__} of {len(means)}" if is_list else type(means).__name__
        raise TypeError(
            f"exchange.mean(...) must be a list of {len(tensors)} tensors, got {got} from "
            f"{exchange!r}. {remedy}"
        )
    for i, (mean, tensor) in enumerate(zip(means, tensors, strict=True)):
        check_array(mean, tensor.shape, "float32", f"exchange.mean(...)[{i}]", exchange, remedy)
    return list(means)
