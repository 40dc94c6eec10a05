"""A decision: which values of a program are saved, and which equations run again.

A decision is a sequence of stages. A stage is a range of equations that is recomputed as one
region, one construct (a loop, a `shard_map`) with a decision for the program inside of it, or a
range that is left to JAX.

>>> Decision((Stage((0, 1, 2), saved=((1, 0),)),)).to_data()
{'stages': [{'equations': '0-2', 'saved': [[1, 0]]}]}
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

Place = tuple[int, int]
"""A value: the number of the equation that makes it, and which of its results it is."""

# More equations than any program has, so that a mistyped range does not fill the memory.
_MOST_EQUATIONS = 10**7


@dataclasses.dataclass(frozen=True)
class Stage:
    """Equations that run together.

    Attributes:
        positions: The equations in program order, numbered without casts to vary over a mesh axis.
        saved: The results that are saved for the backward pass.
        recomputed: The equations that the backward pass runs again.
        region: Whether they are one recomputed region; else JAX saves what it likes of them.
        by_name: Whether the region saves these results under a name, and reads them in the
            backward pass. Else it is a bare `jax.checkpoint`: other regions read them.
        inside: For one construct outside of all regions, the decision for its program.
    """

    positions: tuple[int, ...]
    saved: tuple[Place, ...] = ()
    recomputed: tuple[int, ...] = ()
    region: bool = True
    by_name: bool = True
    inside: "Decision | None" = None

    def to_data(self) -> dict[str, Any]:
        """Return the stage as plain data for JSON."""
        data: dict[str, Any] = {"equations": ranges_text(self.positions)}
        if self.saved:
            data["saved"] = [list(place) for place in self.saved]
        if self.recomputed:
            data["recomputed"] = ranges_text(self.recomputed)
        if not self.by_name:
            data["by_name"] = False
        if not self.region:
            data["inside"] = self.inside and self.inside.to_data()
        return data

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> "Stage":
        """Return the stage that `to_data` described."""
        return cls(
            positions=_numbers(data["equations"]),
            saved=tuple((p, i) for p, i in data.get("saved", ())),
            recomputed=_numbers(data.get("recomputed", "")),
            region="inside" not in data,
            by_name=data.get("by_name", True),
            inside=None if data.get("inside") is None else Decision.from_data(data["inside"]),
        )


@dataclasses.dataclass(frozen=True)
class Decision:
    """What is saved of a program.

    Attributes:
        stages: Its equations, in the order in which they run.
        chunks: For the body of a loop: the number of parts that the loop is cut into. Only the
            carries between parts are saved, and each part is recomputed in turn; 0 is no cut.
        as_written: The function runs as the user wrote it, under its own `jax.checkpoint` regions;
            there are no stages.
        branches: For a `lax.cond`: a decision for each branch, instead of stages; `None` leaves
            a branch to JAX.
        parts: For a loop: how many steps run under which decision, in the order in which they
            run, instead of stages.
        offloaded: The saved values that lie in the host's memory until the backward pass reads
            them; -1 is the equation of what the program is given.
    """

    stages: tuple[Stage, ...]
    chunks: int = 0
    as_written: bool = False
    branches: "tuple[Decision | None, ...]" = ()
    parts: "tuple[tuple[int, Decision], ...]" = ()
    offloaded: tuple[Place, ...] = ()

    def to_data(self) -> dict[str, Any]:
        """Return the decision as plain data for JSON."""
        data: dict[str, Any] = {"stages": [stage.to_data() for stage in self.stages]}
        if self.chunks:
            data["chunks"] = self.chunks
        if self.as_written:
            data["as_written"] = True
        if self.branches:
            data["branches"] = [each and each.to_data() for each in self.branches]
        if self.offloaded:
            data["offloaded"] = [list(place) for place in self.offloaded]
        if self.parts:
            data["parts"] = [[steps, each.to_data()] for steps, each in self.parts]
        return data

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> "Decision":
        """Return the decision that `to_data` described."""
        return cls(
            stages=tuple(Stage.from_data(each) for each in data["stages"]),
            chunks=data.get("chunks", 0),
            as_written=data.get("as_written", False),
            branches=tuple(each and cls.from_data(each) for each in data.get("branches", ())),
            parts=tuple((steps, cls.from_data(each)) for steps, each in data.get("parts", ())),
            offloaded=tuple((p, i) for p, i in data.get("offloaded", ())),
        )


AS_WRITTEN = Decision((), as_written=True)
"""The function under the `jax.checkpoint` regions that the user wrote."""


def ranges_text(numbers: Sequence[int]) -> str:
    """Return whole numbers as ranges: `0-4,7`."""
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ends = [[n for _, n in run] for _, run in runs]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in ends)


def _numbers(text: str) -> tuple[int, ...]:
    parts = [part.partition("-") for part in text.split(",") if part]
    runs = [range(int(first), int(last or first) + 1) for first, _, last in parts]
    if any(not 0 < len(run) < _MOST_EQUATIONS for run in runs):
        raise ValueError(f"{text!r} is no list of equations")
    return tuple(n for run in runs for n in run)
