"""Quartiles and ratios of times; `_private.in_turns` measures them."""

import statistics
from collections.abc import Sequence


def quartiles(numbers: Sequence[float]) -> list[float]:
    """Return the lower quartile, the median and the upper quartile."""
    return statistics.quantiles(numbers, n=4, method="inclusive")


def ratios(numbers: Sequence[float], base: Sequence[float]) -> list[float]:
    """Return the ratio to a base in each round."""
    return [one / other for one, other in zip(numbers, base, strict=True)]
