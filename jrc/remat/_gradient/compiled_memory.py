"""The memory that a compiled program needs, as XLA states it."""

import dataclasses
import math
from typing import Any

import jax

from jrc._jaxpr import nbytes


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device of a compiled program.

    Attributes:
        arguments: Bytes of its arguments.
        outputs: Bytes of its results.
        temporaries: Bytes of its temporary buffers.
        aliased: Bytes of results that reuse donated arguments; counted in both of these.
    """

    arguments: int
    outputs: int
    temporaries: int
    aliased: int

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
    part = math.prod(sharding.shard_shape(array.shape))
    return part * nbytes(aval) // max(math.prod(array.shape), 1)


def memory_of(compiled: Any) -> Memory:
    """Return the memory of a compiled program, from `jax.jit(fn).lower(...).compile()`."""
    stats = compiled.memory_analysis()
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
    )


def memory_needed(lowered: Any) -> Memory:
    """Compile a lowered program and return its memory; the program is not meant to be run."""
    return memory_of(compiled_to_look_at(lowered))


def compiled_to_look_at(lowered: Any) -> Any:
    """Compile a lowered program that is not meant to be run.

    On CPU the machine code is not optimised: bytes and instructions are the same, and compilation
    is several times faster.
    """
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return lowered.compile(compiler_options=options)
