"""Seconds of programs that run here, measured in turns."""

import concurrent.futures
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax

_ROUNDS = 5


def in_turns[K: Hashable](
    programs: Mapping[K, Callable[[], Any]], rounds: int, warm_up: int = 1
) -> dict[K, list[float]]:
    """Time every program once in each round, so that other load affects all of them alike.

    Args:
        programs: Called without arguments; results are waited for.
        rounds: Rounds that count.
        warm_up: Rounds before them.

    Returns:
        Seconds of each program in each round that counts.
    """
    seconds: dict[K, list[float]] = {name: [] for name in programs}
    for i in range(warm_up + rounds):
        for name, run in programs.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            if i >= warm_up:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def median_seconds[K: Hashable](programs: Mapping[K, Callable[[], Any]]) -> dict[K, float]:
    """Return the median seconds of each program, as `in_turns` measures them."""
    return {
        name: statistics.median(seconds) for name, seconds in in_turns(programs, _ROUNDS).items()
    }


def outside_of_traces[T](run: Callable[[], T]) -> T:
    """Return what a function returns in a thread of its own, where nothing is traced.

    What is traced, the mesh and the like belong to a thread: in the caller's a program may be part
    of another one, and would not run.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(run).result()
