"""A region of a program that runs in chunks."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jrc._jaxpr import Slices


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """Equations that run in chunks.

    Attributes:
        slices: What runs on slices.
        equations: The equations, in program order.
        inputs: What enters in slices, with the axis.
        results: Values that are read outside: those that are joined, and sums.
        wide: The widest value inside.
        bytes: Bytes of the widest moment inside, of all slices together.
        edge: Bytes of what enters in slices and leaves, and of what sums over chunks need.
    """

    slices: Slices
    equations: tuple[int, ...]
    inputs: Mapping[Any, int]
    results: tuple[Any, ...]
    wide: Any
    bytes: int
    edge: int

    @property
    def parts(self) -> int:
        """Into how many slices it may be cut; or into a divisor of that."""
        return self.slices.parts
