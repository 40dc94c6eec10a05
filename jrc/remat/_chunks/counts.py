"""How many chunks there may be, and of what size."""

import math


def sizes(parts: int, chunks: int) -> tuple[int, int, int]:
    """Return the size of a chunk, how many have it, and the size of the last one if that is less.

    >>> sizes(12, 4), sizes(11, 4), sizes(10, 7)
    ((3, 4, 0), (3, 3, 2), (2, 5, 0))
    """
    size = -(-parts // chunks)
    return size, *divmod(parts, size)


def chunk_count(parts: int, least: float, most: float = 0.0, unequal: int = 0) -> int:
    """Return how many chunks are at least so many, of equal size if that takes not many more.

    Args:
        parts: Into how many slices the whole may be cut.
        least: How many chunks there are at least.
        most: With so many at most they are large enough; up to twice as many as are needed are
            taken in any case.
        unequal: Up to so many of unequal size are better than more of equal size.

    >>> chunk_count(12, 3.5), chunk_count(8191, 3.5), chunk_count(7, 9), chunk_count(11, 3.5, 20)
    (4, 4, 7, 11)
    >>> chunk_count(17, 8), chunk_count(17, 8, unequal=16), chunk_count(64, 32, unequal=16)
    (17, 9, 32)
    """
    size = max(int(parts / least), 1) if least > 1 else parts
    fewest = -(-parts // size)
    even = next(n for n in divisors(parts) if n >= fewest)
    is_even = even <= max(2 * fewest, most) and not fewest <= unequal < even
    return even if is_even else fewest


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, the smallest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
