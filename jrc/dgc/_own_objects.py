"""A user's own selector, wire format or exchange, with a check of what it returns.

A configuration puts such an object into one of these classes, once: they have its methods, and
raise while they are traced. jrc's own values need none and are called as they are.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jrc._typing import Array, Float
from jrc._validate import finite_number, whole_number
from jrc.dgc._entries import Entries, Space
from jrc.dgc._exchanges import Arrived, EntryExchange, Sent, TensorExchange, Transfer
from jrc.dgc._selectors import Selector
from jrc.dgc._wires import Wire
from jrc.dgc._wires.packing import Words

_PAIR = "Return (Arrived, Sent), as jrc.dgc.AllGather does with jrc.dgc.encoded."
_WORDS = "Return the 32-bit words that one replica sends to each of the others."


def with_checks(value: Any, protocols: Sequence[type]) -> Any:
    """Return an object of a user's own in the class for the first protocol that it has."""
    classes: dict[type, Any] = {
        Selector: OwnSelector,
        Wire: OwnWire,
        EntryExchange: OwnEntryExchange,
        TensorExchange: OwnTensorExchange,
    }
    return next(classes[each](value) for each in protocols if isinstance(value, each))


@dataclasses.dataclass(frozen=True, repr=False)
class _Own:
    """What all of them have.

    Attributes:
        own: The user's object.
    """

    own: Any

    def __repr__(self) -> str:
        return repr(self.own)


class OwnSelector(_Own):
    """A selector of a user's own."""

    @property
    def by_leaf(self) -> bool:
        """Whether entries are chosen leaf after leaf."""
        return self.own.by_leaf

    def choose(
        self, leaves: Sequence[Float[Array, " _n"]], counts: Sequence[int], space: Space
    ) -> Entries:
        """Return the entries to send.

        Raises:
            TypeError: If that is no `Entries`.
            ValueError: If it is not `sum(counts)` entries, or a position comes twice.
        """
        entries = self.own.choose(leaves, counts, space)
        what, remedy = "selector.choose(...)", "Build them with jrc.dgc.choose_each."
        _check_entries(entries, sum(counts), what, self.own, remedy)
        _check_unique(entries.positions, space.starts[-1], what, self.own, remedy)
        return entries


class OwnWire(_Own):
    """A wire format of a user's own."""

    def words(self, entries: int, blocks: int) -> int:
        """Return a number of words, or raise if it is no whole number from 0."""
        remedy = "Return the length of encode(entries, blocks)."
        words = self.own.words(entries, blocks)
        return whole_number(words, "wire.words(...)", least=0, remedy=remedy)

    def ordered(self, entries: Entries) -> Entries:
        """Return entries, or raise if they are no `Entries` or others in number or dtype."""
        found = self.own.ordered(entries)
        remedy = "Return the entries that it was given, in another order or as they are."
        _check_entries(found, entries.values.size, "wire.ordered(...)", self.own, remedy)
        return found

    def encode(self, entries: Entries, blocks: int) -> Words:
        """Return words, or raise if they are not `uint32[words(k, blocks)]`."""
        words = self.own.encode(entries, blocks)
        expected = self.words(entries.values.size, blocks)
        remedy = "Return that many uint32 words, or the length that it has from wire.words."
        _check_array(words, (expected,), "uint32", "wire.encode(...)", self.own, remedy)
        return words

    def decode(self, words: Words, count: int, blocks: int) -> Entries:
        """Return entries, or raise if they are no `Entries` or others in number or dtype."""
        entries = self.own.decode(words, count, blocks)
        remedy = "Return jrc.dgc.Entries(values, positions), as many as encode was given."
        _check_entries(entries, count, "wire.decode(...)", self.own, remedy)
        return entries


class OwnEntryExchange(_Own):
    """An exchange of entries of a user's own."""

    def words(self, transfer: Transfer) -> float:
        """Return the words sent to each replica, or raise if that is no finite number from 0."""
        return finite_number(self.own.words(transfer), "exchange.words(...)", remedy=_WORDS)

    def exchange(self, entries: Entries, transfer: Transfer) -> tuple[Arrived, Sent]:
        """Return what every replica has after the exchange, and what this one keeps.

        Raises:
            TypeError: If that is not a pair of `Arrived` and `Sent`.
            ValueError: If a shape, a dtype or a count in them is wrong.
        """
        out = self.own.exchange(entries, transfer)
        if not isinstance(out, tuple) or len(out) != 2:
            raise TypeError(
                "exchange.exchange(...) must be a pair (Arrived, Sent), got "
                f"{type(out).__name__} from {self.own!r}. {_PAIR}"
            )
        arrived, sent = out
        _check_kind(arrived, Arrived, "exchange.exchange(...)[0]", self.own, _PAIR)
        _check_kind(sent, Sent, "exchange.exchange(...)[1]", self.own, _PAIR)
        _check_arrived(arrived, transfer, self.own)
        _check_sent(sent, transfer, self.own)
        return arrived, sent


class OwnTensorExchange(_Own):
    """An exchange of tensors of a user's own."""

    def words(self, transfer: Transfer) -> float:
        """Return the words sent to each replica, or raise if that is no finite number from 0."""
        return finite_number(self.own.words(transfer), "exchange.words(...)", remedy=_WORDS)

    def mean(self, tensors: Sequence[Float[Array, "..."]], axis: str | None) -> list[Array]:
        """Return the means of tensors over the replicas.

        Raises:
            TypeError: If that is not a list of as many tensors.
            ValueError: If one of them has another shape or dtype.
        """
        means = self.own.mean(tensors, axis)
        remedy = "Return the mean of each tensor over the replicas, in their order."
        is_list = isinstance(means, list | tuple)
        if not is_list or len(means) != len(tensors):
            got = f"{type(means).__name__} of {len(means)}" if is_list else type(means).__name__
            raise TypeError(
                f"exchange.mean(...) must be a list of {len(tensors)} tensors, got {got} from "
                f"{self.own!r}. {remedy}"
            )
        for i, (mean, tensor) in enumerate(zip(means, tensors, strict=True)):
            what = f"exchange.mean(...)[{i}]"
            _check_array(mean, tensor.shape, "float32", what, self.own, remedy)
        return list(means)


def _check_arrived(arrived: Arrived, transfer: Transfer, exchange: EntryExchange) -> None:
    count = whole_number(arrived.count, "Arrived.count", least=0, remedy=_PAIR)
    blocks = whole_number(arrived.blocks, "Arrived.blocks", least=0, remedy=_PAIR)
    if not isinstance(arrived.starts, Sequence):
        raise TypeError(
            "Arrived.starts must be a sequence of positions, one for each row, got "
            f"{type(arrived.starts).__name__} from {exchange!r}. {_PAIR}"
        )
    shape = (len(arrived.starts), transfer.wire.words(count, blocks))
    _check_array(arrived.words, shape, "uint32", "Arrived.words", exchange, _PAIR)
    leaves = len(transfer.counts)
    _check_counts(arrived.counts, leaves, count, "Arrived.counts", exchange, _PAIR)


def _check_sent(sent: Sent, transfer: Transfer, exchange: EntryExchange) -> None:
    _check_entries(sent.left, None, "Sent.left", exchange, _PAIR)
    leaves, size = len(transfer.counts), sent.left.values.size
    _check_counts(sent.counts, leaves, size, "Sent.counts", exchange, _PAIR)
    if sent.returned is not None:
        _check_entries(sent.returned, None, "Sent.returned", exchange, _PAIR)


def _check_kind(value: Any, kind: type, what: str, maker: object, remedy: str) -> None:
    """Raise a `TypeError` unless `value` is of a class of `jrc.dgc`.

    Args:
        value: What the object returned.
        kind: The class that the protocol names.
        what: Its name for the error: `selector.choose(...)`.
        maker: The object, for the error.
        remedy: The way out, a sentence.
    """
    if not isinstance(value, kind):
        raise TypeError(
            f"{what} must be a jrc.dgc.{kind.__name__}, got {_kind(value)} from {maker!r}. {remedy}"
        )


def _check_array(
    array: Any, shape: tuple[int, ...], dtype: str, what: str, maker: object, remedy: str
) -> None:
    """Raise a `ValueError` unless `array` is an array of a shape and a dtype."""
    is_array = isinstance(array, jax.Array | np.ndarray)
    if not is_array or array.shape != shape or array.dtype != dtype:
        raise ValueError(
            f"{what} must be {dtype}{list(shape)}, got {_kind(array)} from {maker!r}. {remedy}"
        )


def _check_entries(entries: Any, count: int | None, what: str, maker: object, remedy: str) -> None:
    """Raise unless `entries` are `Entries` with float32 values and uint32 positions.

    Args:
        entries: What the object returned.
        count: How many there must be; `None` is as many positions as there are values.
        what: Their name for the error.
        maker: The object, for the error.
        remedy: The way out, a sentence.

    Raises:
        TypeError: If they are no `Entries`.
        ValueError: If an array has another shape or dtype.
    """
    _check_kind(entries, Entries, what, maker, remedy)
    shape = (np.size(entries.values) if count is None else count,)
    for name, array, dtype in zip(Entries._fields, entries, ("float32", "uint32"), strict=True):
        _check_array(array, shape, dtype, f"{what}.{name}", maker, remedy)


def _check_counts(
    counts: Any, leaves: int, total: int, what: str, maker: object, remedy: str
) -> None:
    """Raise a `ValueError` unless `counts` are `None`, or one for each leaf with a known sum."""
    if counts is None:
        return
    if not isinstance(counts, Sequence) or len(counts) != leaves or sum(counts) != total:
        raise ValueError(
            f"{what} must be None or {leaves} numbers, one for each leaf, with the sum "
            f"{total}, got {counts!r} from {maker!r}. {remedy}"
        )


def _check_unique(positions: Any, end: int, what: str, maker: object, remedy: str) -> None:
    """Raise a `ValueError` if a position below `end` comes twice. Under `jit` none is known."""
    is_jax = isinstance(positions, jax.Array)
    if isinstance(positions, jax.core.Tracer) or (is_jax and not positions.is_fully_addressable):
        return
    known = np.asarray(positions)
    found, times = np.unique(known[known < end], return_counts=True)
    if (times > 1).any():
        raise ValueError(
            f"{what}.positions must be unique, got {found[times.argmax()]} "
            f"{times.max()} times from {maker!r}. {remedy}"
        )


def _kind(value: Any) -> str:
    """Return an array's dtype and shape, or the type of another value: `float32[68]`, `list`."""
    if isinstance(value, jax.Array | np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    return type(value).__name__
