"""How many chunks there may be, and of what size."""

import math


def sizes(parts: int, chunks: int) -> tuple[int, int, int]:
    """Return the size of a chunk, how many have it, and the size of the last one if that is less.

    >>> sizes(12, 4), sizes(11, 4), sizes(10, 7)
    ((3, 4, 0), (3, 3, 2), (2, 5, 0))
    """
    size = -(-parts // chunks)
    return size, *divmod(parts, size)


def chunk_count(parts: int, least: float) -> int:
    """Return how many chunks are at least so many; equal ones where at most twice as many are.

    >>> chunk_count(12, 3.5), chunk_count(8191, 3.5), chunk_count(7, 9)
    (4, 4, 7)
    """
    size = max(int(parts / least), 1) if least > 1 else parts
    fewest = -(-parts // size)
    even = next(n for n in divisors(parts) if n >= fewest)
    return even if even <= 2 * fewest else fewest


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, the smallest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
