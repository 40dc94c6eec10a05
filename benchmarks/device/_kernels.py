"""Seconds of each kernel of a compiled program, from a trace of the profiler."""

import collections
import gzip
import json
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import jax

CALLS = 3
Kernels = list[tuple[str, str, str, int, float]]


def write_kernels(
    folder: str, row: str, programs: Mapping[str, tuple[Any, Callable[[], Any]]], calls: int = CALLS
) -> None:
    """Write texts and kernels of compiled programs into a file of a folder.

    Args:
        folder: The folder.
        row: The name of the file.
        programs: By name the compiled program, and what runs it once.
        calls: Runs of each program.
    """
    found = {
        name: {"text": compiled.as_text(), "calls": calls, "kernels": kernels_of(run, calls)}
        for name, (compiled, run) in programs.items()
    }
    path = pathlib.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with gzip.open(path / f"{row}.json.gz", "wt") as file:
        json.dump(found, file)


def kernels_of(run: Callable[[], Any], calls: int) -> Kernels:
    """Return what a device ran in a few calls: line, instruction, kernel, times, seconds.

    A kernel of a library has a name of its own; `instruction` is the one of the compiled text,
    where the profiler states it.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(calls):
                jax.block_until_ready(run())
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    times: dict[tuple[str, str, str], list[float]] = collections.defaultdict(list)
    for plane in data.planes:
        if not plane.name.startswith("/device:"):
            continue
        for line in plane.lines:
            for event in line.events:
                stats = {key: value for key, value in event.stats if key == "hlo_op"}
                key = line.name, str(stats.get("hlo_op", "")), event.name
                times[key].append(event.duration_ns / 1e9)
    return [(*key, len(each), sum(each)) for key, each in times.items()]
