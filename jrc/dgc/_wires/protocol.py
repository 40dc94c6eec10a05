"""What a wire format is."""

from typing import Protocol, runtime_checkable

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
