"""The rates of this machine's CPU: measured once, and kept in a file.

The file is in the folder for caches of the user (`XDG_CACHE_HOME`, else `~/.cache`), in `jrc`, or
it is the one that `JRC_HOST_RATES` names. All processes that read it find the same rates, and so
the same plans; delete it to have them measured again. Several processes of `jax.distributed` may be
on several machines: they assume rates, but for those of a file that `JRC_HOST_RATES` names.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import pathlib
import platform
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from jrc._validate import is_real
from jrc.remat._time.measured import in_turns, outside_of_traces
from jrc.remat._time.rates import Rates

# What is taken where nothing can be measured: about two cores of a server.
ASSUMED = Rates(1e11, 5e10, 3e9, 2e10, 1e-6, new_memory=5e9, slow_convolutions=2e9, strided=2e8)
_SIDE, _LARGE, _SUMMANDS, _PASSES, _ROUNDS = 1024, 2**24, 4, 8, 12
_NUMBERS = (
    "products",
    "convolutions",
    "functions",
    "bandwidth",
    "launch",
    "new_memory",
    "slow_convolutions",
    "strided",
)


@functools.cache
def host_rates() -> Rates:
    """Return the rates of this machine's CPU; the first call on a machine takes some seconds.

    Raises:
        ValueError: If `JRC_HOST_RATES` names a file that has no rates.
    """
    named = os.environ.get("JRC_HOST_RATES")
    if jax.process_count() > 1 and not named:
        return ASSUMED
    path = pathlib.Path(named) if named else _path()
    if path is None:
        return measured()
    if found := _read(path):
        return found
    if named and path.exists():
        raise ValueError(
            f"JRC_HOST_RATES must name a file of rates, JSON with a positive number for each of "
            f"{', '.join(_NUMBERS)}, or one that is not there yet, got {named!r}. Delete the file "
            "to have them measured."
        )
    found = measured()
    _write(path, found)
    return _read(path) or found


def measured() -> Rates:
    """Measure the rates of this machine's CPU, each as the least of some runs in turns.

    Other load makes a run longer and never shorter.
    """
    return outside_of_traces(_measured)


def _measured() -> Rates:
    device = jax.local_devices(backend="cpu")[0]
    put = lambda *shape: jax.device_put(np.ones(shape, np.float32), device)  # noqa: E731
    with jax.default_device(device), jax.disable_jit(False), jax.transfer_guard("allow"):
        side, large = put(_SIDE, _SIDE), put(_LARGE)
        columns = [put(_SIDE, _SIDE) for _ in range(_SUMMANDS)]
        small, image, kernel = put(_LARGE // 64), put(16, 64, 32, 32), put(64, 64, 3, 3)

        def passes(once: Callable[..., Any], times: int = _PASSES) -> Callable[..., Any]:
            return lambda x, *rest: jax.lax.fori_loop(0, times, lambda _, y: once(y, *rest), x)

        convolve = lambda x, k: jax.lax.conv(x, k, (1, 1), "SAME")  # noqa: E731
        seconds = _least_seconds(
            product=(lambda x: x @ x, side),
            convolved=(convolve, image, kernel),
            in_loop=(passes(convolve, 2), image[:1], kernel),
            written=(passes(lambda x: x * 1.5 + 0.5), large),
            computed=(passes(jnp.tanh), small),
            new=(lambda x: x * 1.5, large),
            transposed=(lambda *arrays: sum((x * x for x in arrays), 1.5 * side).T, *columns),
        )
    size = large.size * large.dtype.itemsize
    bandwidth = 2 * size * _PASSES / seconds["written"]
    new = seconds["new"]
    return Rates(
        products=2 * _SIDE**3 / seconds["product"],
        convolutions=2 * image.size * 64 * 9 / seconds["convolved"],
        functions=small.size * _PASSES / seconds["computed"],
        bandwidth=bandwidth,
        launch=1e-6,
        new_memory=size / max(new - 2 * size / bandwidth, 0.01 * new),
        strided=_SUMMANDS * side.size / seconds["transposed"],
        slow_convolutions=2 * 2 * image[:1].size * 64 * 9 / seconds["in_loop"],
    )


def _least_seconds(**programs: tuple[Any, ...]) -> dict[str, float]:
    """The least seconds of each function, which is given with its arguments."""
    calls = {name: functools.partial(jax.jit(fn), *args) for name, (fn, *args) in programs.items()}
    return {name: min(seconds) for name, seconds in in_turns(calls, _ROUNDS).items()}


def _path() -> pathlib.Path | None:
    """The file of this machine's rates, another one for other options of the compiler.

    `None` where the user has no home directory.
    """
    try:
        folder = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    except RuntimeError:
        return None
    machine = (
        platform.machine(),
        _processor(),
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        jaxlib.__version__,
        _NUMBERS,
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


def _read(path: pathlib.Path) -> Rates | None:
    """Return the rates of a file; `None` if it is not there, or has none."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or set(data) != set(_NUMBERS):
        return None
    # Rates span many magnitudes, but none of them leads to a time of nothing, or of for ever.
    numbers = [data[name] for name in _NUMBERS]
    if not all(is_real(n) and math.isfinite(n) and 1e-12 < n < 1e21 for n in numbers):
        return None
    rates: dict[str, Any] = {name: float(n) for name, n in zip(_NUMBERS, numbers, strict=True)}
    return Rates(**rates)


def _write(path: pathlib.Path, rates: Rates) -> None:
    """Write the file, whole or not at all; a folder that cannot be written to is left alone."""
    numbers = {name: getattr(rates, name) for name in _NUMBERS}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            new = pathlib.Path(folder) / path.name
            new.write_text(json.dumps(numbers))
            os.replace(new, path)
