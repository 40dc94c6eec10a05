"""Times of several programs, measured in turns."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax


def in_turns(
    programs: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Time every program once in each round, so that other load affects all of them alike.

    Args:
        programs: Called without arguments; results are waited for.
        rounds: Rounds that count.
        warm_up: Rounds before them.

    Returns:
        Seconds of each program in each round that counts.
    """
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for i in range(warm_up + rounds):
        for name, run in programs.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            if i >= warm_up:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def quartiles(numbers: Sequence[float]) -> list[float]:
    """Return the lower quartile, the median and the upper quartile."""
    return statistics.quantiles(numbers, n=4, method="inclusive")


def ratios(numbers: Sequence[float], base: Sequence[float]) -> list[float]:
    """Return the ratio to a base in each round."""
    return [one / other for one, other in zip(numbers, base, strict=True)]
