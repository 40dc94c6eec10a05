"""The rates of this machine's CPU: measured once, and kept in a file.

The file is in the folder for caches of the user (`XDG_CACHE_HOME`, else `~/.cache`), in `jrc`, or
it is the one that `JRC_HOST_RATES` names. All processes that read it find the same rates, and so
the same plans; delete it to have them measured again. Several processes of `jax.distributed` may be
on several machines: they assume rates, but for those of a file that `JRC_HOST_RATES` names.
"""

import contextlib
import dataclasses
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

# From one kernel to the next: assumed. Loops of kernels without much to do take 0.05 us for each,
# and 0.4 us for one of a library.
_LAUNCH = 1e-7
# What is taken where nothing can be measured: about two cores of a server.
ASSUMED = Rates(
    products=1e11,
    convolutions=5e10,
    functions=3e9,
    bandwidth={2**20: 3e10, 2**23: 2.5e10, 2**25: 2e10, 2**27: 1.5e10},
    launch=_LAUNCH,
    new_memory=5e9,
    slow_convolutions=2e9,
    strided={2**18: 5e8, 2**22: 1.5e8},
)
_SIDE, _LARGE, _SUMMANDS, _PASSES, _ROUNDS = 1024, 2**24, 4, 8, 12
# Arrays that are a power of two smaller than the largest, 512 KiB, 4, 16 and 64 MiB, each with how
# many passes are timed.
_SMALLER = {7: 64 * _PASSES, 4: 16 * _PASSES, 2: 4 * _PASSES, 0: _PASSES}
_OF_ACCELERATORS = ("by_dtype", "bandwidth_of_products", "latency_of_products")
_NAMES = tuple(each.name for each in dataclasses.fields(Rates) if each.name not in _OF_ACCELERATORS)


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
            "JRC_HOST_RATES must name a file of rates, JSON with a positive number, or positive "
            f"numbers by sizes, for each of {', '.join(_NAMES)}, or one that is not there yet, got "
            f"{named!r}. Delete the file to have them measured."
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
        columns = [put(1, _SIDE, _SIDE) for _ in range(_SUMMANDS)]
        short = [each.reshape(16, _SIDE // 4, _SIDE // 4) for each in columns]
        small, image, kernel = put(_LARGE // 64), put(16, 64, 32, 32), put(64, 64, 3, 3)

        def passes(once: Callable[..., Any], times: int = _PASSES) -> Callable[..., Any]:
            return lambda x, *rest: jax.lax.fori_loop(0, times, lambda _, y: once(y, *rest), x)

        def transposed(*arrays: Any) -> Any:
            return jnp.swapaxes(sum((x * x for x in arrays[1:]), 1.5 * arrays[0]), 1, 2)

        convolve = lambda x, k: jax.lax.conv(x, k, (1, 1), "SAME")  # noqa: E731
        add = lambda x: x * 1.5 + 0.5  # noqa: E731
        writing = {
            f"written_{n}": (passes(add, times), large[: _LARGE >> n])
            for n, times in _SMALLER.items()
        }
        seconds = _least_seconds(
            product=(lambda x: x @ x, side),
            convolved=(convolve, image, kernel),
            in_loop=(passes(convolve, 2), image[:1], kernel),
            computed=(passes(jnp.tanh), small),
            new=(lambda x: x * 1.5, large),
            columns=(transposed, *columns),
            short=(transposed, *short),
            **writing,
        )
    size = large.nbytes
    written = {
        2 * (size >> n): 2 * (size >> n) * times / seconds[f"written_{n}"]
        for n, times in _SMALLER.items()
    }
    of_memory, new, read = written[2 * size], seconds["new"], _SUMMANDS * side.size
    return Rates(
        products=2 * _SIDE**3 / seconds["product"],
        convolutions=2 * image.size * 64 * 9 / seconds["convolved"],
        functions=small.size * _PASSES / seconds["computed"],
        # Half of what a kernel touches was last touched long ago: assumed.
        bandwidth={size: 2 / (1 / rate + 1 / of_memory) for size, rate in written.items()},
        launch=_LAUNCH,
        new_memory=size / max(new - 2 * size / of_memory, 0.01 * new),
        strided={
            _SIDE**2 // 4: read / seconds["short"],
            4 * _SIDE**2: read / seconds["columns"],
        },
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
        _NAMES,
        tuple(_SMALLER),
        _LAUNCH,
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
    if not isinstance(data, dict) or set(data) != set(_NAMES):
        return None
    try:
        return Rates(**{name: _rate(data[name]) for name in _NAMES})
    except ValueError:
        return None


def _rate(data: Any) -> Any:
    """A number, or numbers by sizes in rising order, as JSON has them.

    Raises:
        ValueError: If it is neither.
    """
    if isinstance(data, dict) and data:
        if min(map(int, data)) < 1:
            raise ValueError(data)
        return {int(size): _number(data[size]) for size in sorted(data, key=int)}
    return _number(data)


def _number(data: Any) -> float:
    # Rates span many magnitudes, but none of them leads to a time of nothing, or of for ever.
    if not (is_real(data) and math.isfinite(data) and 1e-12 < data < 1e21):
        raise ValueError(data)
    return float(data)


def _write(path: pathlib.Path, rates: Rates) -> None:
    """Write the file, whole or not at all; a folder that cannot be written to is left alone."""
    numbers = {name: getattr(rates, name) for name in _NAMES}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            new = pathlib.Path(folder) / path.name
            new.write_text(json.dumps(numbers))
            os.replace(new, path)
