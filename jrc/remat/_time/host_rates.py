"""The rates of this machine's CPU: measured once, and kept in a file.

The file is in the folder for caches of the user (`XDG_CACHE_HOME`, else `~/.cache`), in `jrc`, or
it is the one that `JRC_HOST_RATES` names. All processes that read it find the same rates, and so
the same plans; delete it to measure anew.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import platform
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib

from jrc.remat._time.measured import median_seconds
from jrc.remat._time.rates import Rates

# What is taken where nothing can be measured: about a core of a server.
_ASSUMED = Rates(1e11, 5e10, 3e9, 2e10, 1e-6, new_memory=5e9)
_SIDE, _LARGE, _PASSES = 1024, 2**24, 8


@functools.cache
def host_rates() -> Rates:
    """Return the rates of this machine's CPU; the first call on a machine takes some seconds."""
    if jax.process_index() > 0:
        # Process 0 measures, and its plan is the one that all take.
        return _ASSUMED
    path = _path()
    try:
        return Rates(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        found = measured()
    _write(path, found)
    return found


def measured() -> Rates:
    """Measure the rates of this machine's CPU, each as the median of a few runs."""
    device = jax.local_devices(backend="cpu")[0]
    with jax.default_device(device), jax.enable_x64(False):
        side, large = jnp.ones((_SIDE, _SIDE)), jnp.ones(_LARGE)
        image, kernel = jnp.ones((16, 64, 32, 32)), jnp.ones((64, 64, 3, 3))

        def passes(once: Callable[[Any], Any]) -> Callable[[Any], Any]:
            return lambda x: jax.lax.fori_loop(0, _PASSES, lambda _, y: once(y), x)

        product = _seconds(lambda x: x @ x, side)
        convolved = _seconds(lambda x, k: jax.lax.conv(x, k, (1, 1), "SAME"), image, kernel)
        written = _seconds(passes(lambda x: x * 1.5 + 0.5), large) / _PASSES
        small = large[: _LARGE // 64]
        computed = _seconds(passes(jnp.tanh), small) / _PASSES
        new = _seconds(lambda x: x * 1.5, large)
    size = large.size * large.dtype.itemsize
    bandwidth = 2 * size / written
    return Rates(
        products=2 * _SIDE**3 / product,
        convolutions=2 * image.size * 64 * 9 / convolved,
        functions=small.size / computed,
        bandwidth=bandwidth,
        launch=1e-6,
        new_memory=size / max(new - 2 * size / bandwidth, 0.01 * new),
    )


def _seconds(fn: Callable[..., Any], *args: Any) -> float:
    run = jax.jit(fn)
    (seconds,) = median_seconds([lambda: run(*args)])
    return seconds


def _path() -> pathlib.Path:
    """The file of this machine's rates; another one for other options of the compiler."""
    if named := os.environ.get("JRC_HOST_RATES"):
        return pathlib.Path(named)
    folder = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    machine = (
        platform.machine(),
        _processor(),
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        jaxlib.__version__,
        os.environ.get("XLA_FLAGS", ""),
    )
    key = hashlib.sha256(repr(machine).encode()).hexdigest()[:16]
    return pathlib.Path(folder) / "jrc" / f"host_rates_{key}.json"


def _processor() -> str:
    """What the system calls the processor."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("model name")), "")


def _write(path: pathlib.Path, rates: Rates) -> None:
    """Write the file, whole or not at all; a folder that cannot be written to is left alone."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(dataclasses.asdict(rates), file)
        os.replace(file.name, path)
    except OSError:
        return
