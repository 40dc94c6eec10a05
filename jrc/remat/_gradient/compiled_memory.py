"""The memory that a compiled program needs, as XLA states it."""

import contextlib
import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax

from jrc._jaxpr import nbytes
from jrc._specs import number_of_shards
from jrc._targets import quiet_compiler
from jrc.remat._gradient.refused import bytes_in_refusal

# Where JAX has a GPU its callbacks are lowered with their functions: `callback_lowering`.
_CALLBACKS_BESIDE_A_GPU = (
    "jrc: a program that calls Python functions (jax.debug.print, jax.pure_callback) must be "
    "compiled for an absent GPU in a process that has none, got a process with a GPU. Hide it with "
    "the environment variable JAX_PLATFORMS=cpu."
)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device of a compiled program.

    Attributes:
        arguments: Bytes of its arguments.
        outputs: Bytes of its results.
        temporaries: Bytes of its temporary buffers.
        aliased: Bytes of results that reuse donated arguments; counted in both of these.
        host: Bytes of temporary buffers in the host's memory, no part of the peak.
    """

    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    host: int = 0

    @property
    def peak(self) -> int:
        """Bytes of arguments, outputs and temporaries, aliased ones counted once.

        XLA's own `peak_memory_in_bytes` leaves the temporaries out on CPU.
        """
        return self.arguments + self.outputs + self.temporaries - self.aliased


def bytes_on_device(array: Any) -> int:
    """Return the bytes on one device of an array, or of a shape with a sharding."""
    aval = jax.typeof(array)
    sharding = None if isinstance(array, jax.core.Tracer) else getattr(array, "sharding", None)
    if not isinstance(sharding, jax.sharding.Sharding):
        return nbytes(aval)
    if isinstance(sharding, jax.sharding.NamedSharding):
        # Manual axes are in no spec: inside of `shard_map` the shape is that of a shard already.
        parts = number_of_shards(sharding.spec, sharding.mesh.shape)
        return nbytes(aval) // parts
    part = math.prod(sharding.shard_shape(array.shape))
    return part * nbytes(aval) // max(math.prod(array.shape), 1)


def device_of(arrays: Iterable[Any]) -> Any:
    """Return a device that a program with these arguments is compiled for.

    Args:
        arrays: Arrays, or shapes with shardings; where none names a device, it is JAX's first.
    """
    for array in arrays:
        is_tracer = isinstance(array, jax.core.Tracer)
        if is_tracer or (isinstance(array, jax.Array) and not array.committed):
            continue
        sharding = getattr(array, "sharding", None)
        if isinstance(sharding, jax.sharding.Sharding) and _names_devices(sharding):
            return min(sharding.device_set, key=lambda device: device.id)
    return jax.local_devices()[0]


def _names_devices(sharding: jax.sharding.Sharding) -> bool:
    mesh = getattr(sharding, "mesh", None)
    return mesh is None or isinstance(mesh, jax.sharding.Mesh)


def memory_of(compiled: Any) -> Memory:
    """Return the memory of a compiled program, from `jax.jit(fn).lower(...).compile()`."""
    stats = compiled.memory_analysis()
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        host=stats.host_temp_size_in_bytes,
    )


def memory_of_refused(error: Exception, arguments: int = 0) -> Memory:
    """Return the memory of a program that a compiler refused as too large.

    The TPU compiler returns no program then, and states one number: arguments, results and
    temporaries together. What is not arguments counts as temporaries.

    Args:
        error: What the compiler raised.
        arguments: Bytes of the arguments on one device.

    Raises:
        RuntimeError: If it is no such error, the one that came; if it has no number, one that says
            so.
    """
    size = bytes_in_refusal(str(error))
    if size is None:
        raise error
    given = min(arguments, size)
    return Memory(arguments=given, outputs=0, temporaries=size - given, aliased=0)


def memory_needed(lowered: Any, platform: str | None = None, arguments: int = 0) -> Memory:
    """Compile a lowered program and return its memory; the program is not meant to be run.

    Args:
        lowered: The program.
        platform: What it is lowered for: `"cpu"`, `"gpu"` or `"tpu"`; by default JAX's own.
        arguments: Bytes of its arguments on one device, where the compiler may refuse it.

    Raises:
        RuntimeError: If the compiler refuses the program because of its size and does not say how
            much memory it needs.
    """
    memory, _ = compiled_with_memory(lowered, platform, arguments)
    return memory


def compiled_with_memory(
    lowered: Any, platform: str | None = None, arguments: int = 0
) -> tuple[Memory, Any]:
    """Return what `memory_needed` returns, and the program; `None` where it was refused."""
    try:
        compiled = compiled_to_look_at(lowered, platform)
    except jax.errors.JaxRuntimeError as error:
        return memory_of_refused(error, arguments), None
    return memory_of(compiled), compiled


def compiled_to_look_at(lowered: Any, platform: str | None = None) -> Any:
    """Compile a lowered program that is not meant to be run.

    On CPU the machine code is not optimised: bytes and instructions are the same, and compilation
    is several times faster.
    """
    ours = jax.default_backend()
    platform = platform or ours
    options = {"xla_backend_optimization_level": 0} if platform == "cpu" else None
    with contextlib.nullcontext() if platform == ours else quiet_compiler():
        try:
            return lowered.compile(compiler_options=options)
        except TypeError as error:
            if "host_callbacks" not in str(error):
                raise
            raise RuntimeError(_CALLBACKS_BESIDE_A_GPU) from error
