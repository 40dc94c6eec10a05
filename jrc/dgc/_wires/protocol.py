"""What a wire format is."""

from typing import Protocol, runtime_checkable

from jrc._validate import whole_number
from jrc.dgc._check_own_objects import check_array, check_entries
from jrc.dgc._entries import Entries
from jrc.dgc._wires.packing import Words


@runtime_checkable
class Wire(Protocol):
    """How entries become 32-bit words. Any object with these methods works in `wire=`.

    Its methods must be traceable. What a format rounds away stays in the
    accumulated gradient v of the sender. A collective moves words and converts nothing: on CPUs
    half-precision numbers would travel as float32.

    A payload may contain entries of no leaf, which fill it up: their values are zero and their
    positions are at or above `blocks * 65536`. `decode` must return them as such.
    """

    def words(self, entries: int, blocks: int) -> int:
        """Return the number of words for `entries` entries of a space of `blocks` blocks."""
        ...

    def ordered(self, entries: Entries) -> Entries:
        """Return the entries in the order in which `encode` takes them."""
        ...

    def encode(self, entries: Entries, blocks: int) -> Words:
        """Return `uint32[words(k, blocks)]` for k entries that `ordered` returned."""
        ...

    def decode(self, words: Words, count: int, blocks: int) -> Entries:
        """Return the `count` entries that `encode` was given, values rounded to float32."""
        ...


def words_by(wire: Wire, entries: int, blocks: int) -> int:
    """Return the number of words of a wire format, after a check.

    Raises:
        TypeError: If it is no whole number.
        ValueError: If it is negative.
    """
    remedy = "Return the length of encode(entries, blocks)."
    return whole_number(wire.words(entries, blocks), "wire.words(...)", least=0, remedy=remedy)


def ordered_by(wire: Wire, entries: Entries) -> Entries:
    """Return entries in the order of a wire format, after a check.

    Raises:
        TypeError: If that is no `Entries`.
        ValueError: If it is another number of entries, or of another dtype.
    """
    found = wire.ordered(entries)
    remedy = "Return the entries that it was given, in another order or as they are."
    check_entries(found, entries.values.size, "wire.ordered(...)", wire, remedy)
    return found


def encoded_by(wire: Wire, entries: Entries, blocks: int) -> Words:
    """Return the words that a wire format writes, after a check.

    Raises:
        ValueError: If they are not `uint32[wire.words(k, blocks)]`.
    """
    words = wire.encode(entries, blocks)
    expected = words_by(wire, entries.values.size, blocks)
    remedy = "Return that many uint32 words, or the length that it has from wire.words."
    check_array(words, (expected,), "uint32", "wire.encode(...)", wire, remedy)
    return words


def decoded_by(wire: Wire, words: Words, count: int, blocks: int) -> Entries:
    """Return the entries that a wire format reads, after a check.

    Raises:
        TypeError: If that is no `Entries`.
        ValueError: If it is another number of entries, or of another dtype.
    """
    entries = wire.decode(words, count, blocks)
    remedy = "Return jrc.dgc.Entries(values, positions), as many as encode was given."
    check_entries(entries, count, "wire.decode(...)", wire, remedy)
    return entries
