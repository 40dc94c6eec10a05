"""Choose the steps of a loop whose carries are saved: levels of segments inside segments.

>>> levels_of(11, (3,))
(Level(rest=2, segments=3, size=3), Level(rest=0, segments=3, size=1))
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jrc._validate import is_whole

# One level of 4 segments saves as many carries as two levels of 2 segments. It recomputes 3/4 of
# the steps, they 1/2 each, and its program has half the size.
_FACTORS = (4, 3, 5)
_RULE = (
    "segments must be 'sqrt', 'log', a whole number or a tuple of whole numbers, one for each level"
)


@dataclasses.dataclass(frozen=True)
class Level:
    """A range of `rest + segments * size` steps, the remainder first.

    Attributes:
        rest: The number of steps before the first segment, less than `segments`.
        segments: The number of segments; the carry before each is saved.
        size: The number of steps of each segment: the range of the next level, or one step.
    """

    rest: int
    segments: int
    size: int


def levels_of(length: int, counts: Sequence[int]) -> tuple[Level, ...]:
    """Cut `length` steps into `counts[0]` segments, each of these into `counts[1]`, ….

    Segments of the last count are cut into single steps.
    """
    levels = []
    for count in counts:
        size = length // count
        levels.append(Level(length - count * size, count, size))
        length = size
    return tuple(levels) if levels and length == 1 else (*levels, Level(0, length, 1))


def segment_counts(segments: Any, length: int) -> tuple[int, ...]:
    """Return the number of segments at each level, for the argument `segments`.

    Raises:
        TypeError: If it is neither text nor whole numbers.
        ValueError: If the text is unknown, a number is below 1, or there are more segments than
            steps.
    """
    if isinstance(segments, str):
        return _named(segments, length)
    counts = tuple(segments) if isinstance(segments, tuple | list) else (segments,)
    if not all(map(is_whole, counts)):
        raise TypeError(f"{_RULE}, got {segments!r}. Write segments=8 or segments=(8, 4).")
    if not counts or min(counts) < 1:
        raise ValueError(
            "segments must have at least one level and one segment in each, "
            f"got segments={segments!r}. Write segments=1 to save the first carry only."
        )
    if math.prod(counts) > length:
        raise ValueError(
            "segments must have at least one step each, got "
            f"segments={segments!r}, {math.prod(counts)} in all, for {length} steps. Write fewer, "
            "or 'sqrt'."
        )
    return tuple(int(n) for n in counts)


def _named(segments: str, length: int) -> tuple[int, ...]:
    """Return the number of segments at each level, for `"sqrt"` and `"log"`."""
    if segments == "sqrt":
        return (_balanced(length),)
    if segments == "log":
        return tuple(_quarters(length))
    raise ValueError(f"{_RULE}, got {segments!r}. Write segments='sqrt'.")


def _balanced(length: int) -> int:
    """Return the number of segments with which a single level saves the fewest carries."""
    near = range(1, 2 * math.isqrt(length) + 1)
    return min(near, key=lambda n: n + length // n + length % n, default=1)


def _quarters(length: int) -> Iterator[int]:
    """Yield the segments of each level: 4, or 3 or 5 if these leave a smaller remainder."""
    while length > max(_FACTORS):
        factor = min(_FACTORS, key=lambda n: length % n)
        yield factor
        length //= factor
