"""Seconds of programs that run here, measured in turns."""

import concurrent.futures
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

_ROUNDS = 5


def median_seconds(runs: Sequence[Callable[[], Any]]) -> list[float]:
    """Return the median seconds of each program.

    Each runs once before any is timed. Then all run in turns, so that what slows the machine for a
    while slows all of them.

    Args:
        runs: Functions that run a program and return its results.
    """
    for run in runs:
        jax.block_until_ready(run())
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(_ROUNDS):
        for run, found in zip(runs, times, strict=True):
            began = time.perf_counter()
            jax.block_until_ready(run())
            found.append(time.perf_counter() - began)
    return [statistics.median(each) for each in times]


def outside_of_traces[T](run: Callable[[], T]) -> T:
    """Return what a function returns in a thread of its own, where nothing is traced.

    What is traced, the mesh and the like belong to a thread: in the caller's a program may be part
    of another one, and would not run.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(run).result()
