"""What a compiled program needs, as XLA states it."""

import dataclasses
import math
from typing import Any

import jax

from jrc._jaxpr import nbytes


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device of a compiled program.

    Attributes:
        arguments: What it is given.
        outputs: What it returns.
        temporaries: What it needs between the two.
        aliased: What it returns in the place of donated arguments, counted in both.
    """

    arguments: int
    outputs: int
    temporaries: int
    aliased: int

    @property
    def peak(self) -> int:
        """Arguments, outputs and temporaries, what is aliased once.

        XLA's own peak leaves the temporaries out on CPU.
        """
        return self.arguments + self.outputs + self.temporaries - self.aliased


def bytes_on_device(array: Any) -> int:
    """Bytes of the part of an array, or of a shape with a sharding, that one device has."""
    aval = jax.typeof(array)
    sharding = None if isinstance(array, jax.core.Tracer) else getattr(array, "sharding", None)
    if not isinstance(sharding, jax.sharding.Sharding):
        return nbytes(aval)
    part = math.prod(sharding.shard_shape(array.shape))
    return part * nbytes(aval) // max(math.prod(array.shape), 1)


def memory_of(compiled: Any) -> Memory:
    """The bytes of a compiled program, from `jax.jit(fn).lower(...).compile()`."""
    stats = compiled.memory_analysis()
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
    )


def memory_needed(lowered: Any) -> Memory:
    """The bytes of a lowered program, compiled to be looked at and not to be run.

    On CPU its machine code is not optimised: the bytes are the same, and come several times sooner.
    """
    quick = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return memory_of(lowered.compile(compiler_options=quick))
