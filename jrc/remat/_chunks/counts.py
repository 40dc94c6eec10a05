"""How many chunks of equal size there may be."""

import math


def chunk_count(parts: int, least: float) -> int:
    """Return the smallest divisor of `parts` that is at least this; the largest if none is."""
    return next((n for n in divisors(parts) if n >= least), parts)


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, the smallest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
