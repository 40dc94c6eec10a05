"""The predicted peak of a sharded program, calibrated by a few compiled ones.

The model counts the bytes of whole arrays. How XLA splits intermediate values over devices is
known from a compiled program only: predictions lie on the lines through the candidates that the
search has compiled so far. Before the first of them, temporaries are taken to be split into as many
parts as the argument that is split most.

Where no plan is to be verified, a few candidates are compiled for these lines: nothing recomputed,
the leanest, the one that recomputes least, and two in between. Between the first and the third lies
a step: with nothing recomputed XLA keeps the parameters that it gathered for the forward pass,
which the model does not count.

Nor does it count partial gradients, which wait for one combined all-reduce at the end of the
program, beside the memory of the results. Where they are as large as activations, as in a mixture
of experts, what is recomputed last lies on top of them, and the peak of a candidate may lie above
that of one which saves more.
"""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import jax

from jrc._jaxpr import nbytes
from jrc.remat._gradient.compiled_memory import bytes_on_device


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Lines from the model's peak to that of one device.

    Attributes:
        points: Pairs of a predicted and a compiled peak, both rising; none changes nothing.

    >>> Calibration(((100, 30), (300, 70), (500, 80))).of(200)
    50
    """

    points: tuple[tuple[int, int], ...] = ()

    def of(self, peak: int) -> int:
        """Return the predicted peak of one device; beyond the ends by the last line's slope."""
        if not self.points:
            return peak
        if len(self.points) == 1:
            ((x, y),) = self.points
            return round(peak * y / x) if x else y
        lines = list(itertools.pairwise(self.points))
        (x0, y0), (x1, y1) = next((line for line in lines if peak <= line[1][0]), lines[-1])
        return max(0, round(y0 + (peak - x0) * (y1 - y0) / (x1 - x0)))


def calibration_of(pairs: Iterable[tuple[int, int]]) -> Calibration:
    """Return the calibration through pairs of a predicted and a compiled peak.

    The last pair always counts. A pair that does not rise to the next one has no line, and is left
    out.

    >>> calibration_of([(100, 30), (200, 90), (300, 70)]).points
    ((100, 30), (300, 70))
    """
    points: list[tuple[int, int]] = []
    for x, y in reversed(list(pairs)):
        if not points or (x < points[-1][0] and y < points[-1][1]):
            points.append((x, y))
    return Calibration(tuple(reversed(points)))


def is_split(arguments: Iterable[Any]) -> bool:
    """Whether any of these arrays, or shapes, is split over devices."""
    shardings = (getattr(leaf, "sharding", None) for leaf in arguments)
    return any(s is not None and not s.is_fully_replicated for s in shardings)


def most_parts(arrays: Iterable[Any]) -> int:
    """Return into how many parts the array, or shape, is split that is split most; at least 1."""
    sizes = ((nbytes(jax.typeof(array)), bytes_on_device(array)) for array in arrays)
    return max((whole // part for whole, part in sizes if part), default=1)
