"""How boundaries become segments: three rules, as plain arithmetic over positions.

Positions count the equations that the result depends on, in program order, without marks and mere
broadcasts. A segment is a half-open range of them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Boundary(NamedTuple):
    """A named value: where it is made (-1 for an input), and where it is first read afterwards."""

    name: str
    producer: int
    consumer: int


class Ranges(NamedTuple):
    """The segments in order, and the pairs of boundaries with too little between them."""

    segments: tuple[tuple[int, int], ...]
    too_short: tuple[tuple[str, str], ...]


def partition(boundaries: Sequence[Boundary]) -> Ranges:
    """Return the ranges from after each boundary's producer up to the producer of the next."""
    ends = sorted({b.producer + 1 for b in boundaries if b.producer >= 0})
    return Ranges(tuple(zip([0, *ends], ends, strict=False)), ())


def fluid(boundaries: Sequence[Boundary]) -> Ranges:
    """Return the ranges of Paddle's `RecomputeOptimizer`.

    From the first consumer of each boundary to the producer of the next, and a prefix.

    Source: Paddle `backward.py`, `ProgramStats.get_recompute_segments`.
    """
    if len(boundaries) == 1:
        (only,) = boundaries
        return Ranges(((0, only.producer + 1),) if only.producer > 0 else (), ())
    segments, too_short = _between(boundaries)
    if segments and segments[0][0] > 0:
        segments = [(0, segments[0][0]), *segments]
    return Ranges(tuple(segments), too_short)


def pass_(boundaries: Sequence[Boundary]) -> Ranges:
    """Return the ranges of Paddle's `RecomputePass`.

    Up to the first boundary, and then as `fluid` without its prefix.

    Source: Paddle `auto_parallel_recompute.py`, `RecomputeState.get_recompute_segments`.
    """
    segments, too_short = _between(boundaries)
    if boundaries and boundaries[0].producer >= 0:
        segments = [(0, boundaries[0].producer + 1), *segments]
    return Ranges(tuple(segments), too_short)


RULES: dict[str, Callable[[Sequence[Boundary]], Ranges]] = {
    "partition": partition,
    "fluid": fluid,
    "pass": pass_,
}


def _between(
    boundaries: Sequence[Boundary],
) -> tuple[list[tuple[int, int]], tuple[tuple[str, str], ...]]:
    """The ranges between adjacent boundaries with more than one equation, and the other pairs."""
    segments, too_short = [], []
    for first, second in zip(boundaries, boundaries[1:], strict=False):
        if second.producer + 1 - first.consumer > 1:
            segments.append((first.consumer, second.producer + 1))
        else:
            too_short.append((first.name, second.name))
    return segments, tuple(too_short)
