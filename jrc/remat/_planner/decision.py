"""What a plan says of a program: its stretches, and what each of them keeps.

>>> Choice((Piece((0, 1, 2), held=((1, 0),)),)).data()
{'pieces': [{'equations': '0-2', 'held': [[1, 0]]}]}
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

Place = tuple[int, int]
# Above all programs, so that a slip in a text does not fill the memory.
_MOST = 10**7


@dataclasses.dataclass(frozen=True)
class Piece:
    """Equations that run together.

    Attributes:
        positions: The equations, in program order, numbered without casts to vary over a mesh axis.
        held: What they make and keep: equation and number of the result.
        again: Those that the backward pass runs again.
        region: Whether they are a region; else one construct that stands outside of all.
        inside: For such a construct, what is kept of its inside; `None` is as JAX keeps it.
    """

    positions: tuple[int, ...]
    held: tuple[Place, ...] = ()
    again: tuple[int, ...] = ()
    region: bool = True
    inside: "Choice | None" = None

    def data(self) -> dict[str, Any]:
        """As plain data."""
        found: dict[str, Any] = {"equations": ranges(self.positions)}
        if self.held:
            found["held"] = [list(place) for place in self.held]
        if self.again:
            found["again"] = ranges(self.again)
        if not self.region:
            found["inside"] = self.inside and self.inside.data()
        return found

    @classmethod
    def of(cls, data: dict[str, Any]) -> "Piece":
        """From plain data."""
        return cls(
            positions=_numbers(data["equations"]),
            held=tuple((p, i) for p, i in data.get("held", ())),
            again=_numbers(data.get("again", "")),
            region="inside" not in data,
            inside=None if data.get("inside") is None else Choice.of(data["inside"]),
        )


@dataclasses.dataclass(frozen=True)
class Choice:
    """What is kept of a program.

    Attributes:
        pieces: Its equations, in the order in which they run.
        chunks: For the body of a loop: into how many parts the loop is cut, of which only the
            carries are kept and which are run again one after another; 0 is none.
    """

    pieces: tuple[Piece, ...]
    chunks: int = 0

    def data(self) -> dict[str, Any]:
        """As plain data."""
        found: dict[str, Any] = {"pieces": [piece.data() for piece in self.pieces]}
        return found | ({"chunks": self.chunks} if self.chunks else {})

    @classmethod
    def of(cls, data: dict[str, Any]) -> "Choice":
        """From plain data."""
        return cls(tuple(Piece.of(each) for each in data["pieces"]), data.get("chunks", 0))


def ranges(numbers: Sequence[int]) -> str:
    """Whole numbers in short: `0-4,7`."""
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ends = [[n for _, n in run] for _, run in runs]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in ends)


def _numbers(text: str) -> tuple[int, ...]:
    parts = [part.partition("-") for part in text.split(",") if part]
    runs = [range(int(first), int(last or first) + 1) for first, _, last in parts]
    if any(not 0 < len(run) < _MOST for run in runs):
        raise ValueError(f"{text!r} is no list of equations")
    return tuple(n for run in runs for n in run)
