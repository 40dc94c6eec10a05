"""Where a long loop keeps its carry: levels of segments inside segments, as plain numbers.

>>> levels_of(11, (3,))
(Level(rest=2, segments=3, size=3), Level(rest=0, segments=3, size=1))
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any

# Four carries at a level that re-runs 3 of 4 quarters hold no more than two levels of two, which
# re-run a half each, and make half the program.
_FACTORS = (4, 3, 5)


@dataclasses.dataclass(frozen=True)
class Level:
    """A stretch of `rest + segments * size` steps, the odd ones first.

    Attributes:
        rest: Steps before the first segment, fewer than there are segments.
        segments: How many segments follow; the carry before each is held.
        size: Steps of each segment: the stretch of the next level, or one step.
    """

    rest: int
    segments: int
    size: int


def levels_of(length: int, counts: Sequence[int]) -> tuple[Level, ...]:
    """Cut `length` steps into `counts[0]` segments, each of these into `counts[1]`, ….

    What the last count leaves are single steps.
    """
    levels = []
    for count in counts:
        size = length // count
        levels.append(Level(length - count * size, count, size))
        length = size
    return tuple(levels) if levels and length == 1 else (*levels, Level(0, length, 1))


def segment_counts(segments: Any, length: int) -> tuple[int, ...]:
    """The number of segments at each level that `segments=` asks for.

    Raises:
        TypeError: When it is neither text nor whole numbers.
        ValueError: When the text is unknown, a number is below 1, or there are more segments
            than steps.
    """
    if isinstance(segments, str):
        return _named(segments, length)
    counts = tuple(segments) if isinstance(segments, tuple | list) else (segments,)
    if not all(isinstance(n, Integral) and not isinstance(n, bool) for n in counts):
        raise TypeError(
            "jrc.recompute_scan: segments is 'sqrt', 'log', a number of segments or a tuple of "
            f"numbers, one for each level; got {segments!r}. Write segments=8 or segments=(8, 4)."
        )
    if not counts or min(counts) < 1:
        raise ValueError(
            "jrc.recompute_scan: there is at least one level and one segment in each; got "
            f"segments={segments!r}. segments=1 keeps the first carry only."
        )
    if math.prod(counts) > length:
        raise ValueError(
            f"jrc.recompute_scan: a segment has at least one step; got segments={segments!r}, "
            f"which makes {math.prod(counts)}, over {length} steps. Ask for fewer, or 'sqrt'."
        )
    return tuple(int(n) for n in counts)


def _named(segments: str, length: int) -> tuple[int, ...]:
    if segments == "sqrt":
        return (_balanced(length),)
    if segments == "log":
        return tuple(_quarters(length))
    raise ValueError(
        "jrc.recompute_scan: segments is 'sqrt', 'log', a number of segments or a tuple of "
        f"numbers, one for each level; got {segments!r}."
    )


def _balanced(length: int) -> int:
    """The number of segments with which a single level holds the fewest carries."""
    near = range(1, 2 * math.isqrt(length) + 1)
    return min(near, key=lambda n: n + length // n + length % n, default=1)


def _quarters(length: int) -> Iterator[int]:
    """Cut in four, or in three or five where fewer steps are left over."""
    while length > max(_FACTORS):
        factor = min(_FACTORS, key=lambda n: length % n)
        yield factor
        length //= factor
