"""Compile-only devices: JAX's compilers for accelerators that this machine does not have.

libtpu and JAX's CUDA plugin look for hardware when they are loaded. Environment variables keep them
from it, and from writing about it; they are set while the library is loaded, and not longer.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import pathlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.experimental import topologies

from jrc._jaxpr import lower_callbacks_for_absent_gpus
from jrc._targets.compilers import compiler_versions
from jrc._targets.gpu_description import gpu_description
from jrc._targets.names import ParsedName

_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}
_FOR_TPU = _QUIET | {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    # Else one process of a machine at a time may load libtpu, as if it took the machine's TPUs.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}
# Without a driver the plugin's check of CUDA's versions fails, and the plugin is left out.
_FOR_GPU = _QUIET | {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}

# Google's names of topologies: v5p is its "v5".
_TPU_NAMES = {"v5p": "v5"}
# Both TensorCores of a v4 chip are one device, as they are on the machines.
_TPU_OPTIONS: Mapping[str, Mapping[str, Any]] = {"v4": {"chip_config_name": "megacore"}}

_LOADING = threading.Lock()


def compile_only_devices(target: ParsedName) -> tuple[Any, ...]:
    """Return the devices of a target; programs are compiled for them, and none can run.

    Args:
        target: The name, parsed.

    Raises:
        ImportError: If the platform's compiler is not installed.
        RuntimeError: If it does not start: its version belongs to another JAX.
    """
    package = _package_of(target.chip.platform)
    if package is None:
        extra = "cuda13" if target.chip.platform == "gpu" else "tpu"
        raise ImportError(
            f"{target.name!r} must have its compiler installed, got none: "
            f"pip install '.[{extra}]' in a checkout"
        )
    try:
        with _LOADING:
            return _devices(target)
    except Exception as error:
        installed = ", ".join(map(" ".join, compiler_versions().items()))
        raise RuntimeError(
            f"the compiler of {target.name!r} must start, got "
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}. Installed are "
            f"{installed}: install versions that belong together, with "
            f"pip install -U '.[{_extra_of(package)}]' in a checkout."
        ) from error


def is_compile_only(device: Any) -> bool:
    """Return whether programs are compiled for a device, and none can run on it here."""
    try:
        return device not in jax.devices(device.platform)
    except RuntimeError:  # no backend of this platform starts here
        return True


@functools.lru_cache(maxsize=64)
def _devices(target: ParsedName) -> tuple[Any, ...]:
    return _gpu_devices(target) if target.chip.platform == "gpu" else _tpu_devices(target)


def _tpu_devices(target: ParsedName) -> tuple[Any, ...]:
    dims, options = target.dims, dict(_TPU_OPTIONS.get(target.chip.name, {}))
    name = _TPU_NAMES.get(target.chip.name, target.chip.name)
    if all(n == 1 for n in dims):
        options["chips_per_host_bounds"] = (1, 1, 1)
    # A machine that has TPUs loads libtpu for them, with its own settings.
    with _environment({} if _has_tpus() else _FOR_TPU):
        topology = f"{name}:{'x'.join(map(str, dims))}"
        return tuple(topologies.get_topology_desc(topology, "tpu", **options).devices)


def _gpu_devices(target: ParsedName) -> tuple[Any, ...]:
    devices, nodes = target.dims
    options = {
        "target_config": gpu_description(target.chip.name),
        "topology": f"1x{nodes}x{devices}",
    }
    with _environment(_FOR_GPU):
        try:
            found = topologies.get_topology_desc(target.name, "cuda", **options)
        except NotImplementedError:
            # JAX loads plugins once, and left this one out: it was before the check was off.
            _register_cuda()
            found = topologies.get_topology_desc(target.name, "cuda", **options)
    lower_callbacks_for_absent_gpus()
    return tuple(found.devices)


def _register_cuda() -> None:
    for entry in importlib.metadata.entry_points(group="jax_plugins"):
        if entry.name.startswith("xla_cuda"):
            plugin = entry.load()
            getattr(plugin, "initialize", plugin)()


def _package_of(platform: str) -> str | None:
    """Return the installed package that has the compiler of a platform."""
    if platform == "gpu":
        plugins = importlib.metadata.entry_points(group="jax_plugins")
        names = sorted(plugin.name for plugin in plugins if plugin.name.startswith("xla_cuda"))
        return f"jax-{names[-1].removeprefix('xla_')}-plugin" if names else None
    has_path = os.path.isfile(os.environ.get("TPU_LIBRARY_PATH", ""))
    return "libtpu" if has_path or importlib.util.find_spec("libtpu") is not None else None


def _extra_of(package: str) -> str:
    return "tpu" if package == "libtpu" else package.split("-")[1]


def _has_tpus() -> bool:
    return any(any(pathlib.Path("/dev").glob(each)) for each in ("accel[0-9]*", "vfio/[0-9]*"))


@contextlib.contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that the user has not set, and take them away afterwards."""
    new = {key: value for key, value in wanted.items() if key not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for key in new:
            os.environ.pop(key, None)
