"""Into how many parts XLA splits the values of a program over devices, as far as that is said."""

from collections.abc import Iterable
from typing import Any

import jax

from jrc._jaxpr import Program, nbytes, sharding_of, walk
from jrc._specs import number_of_shards
from jrc.remat._gradient.compiled_memory import bytes_on_device


def most_parts(arrays: Iterable[Any], program: Program | None = None) -> int:
    """Return into how many parts the array or value is split that is split most; at least 1.

    Args:
        arrays: Arrays, or shapes with shardings: the arguments.
        program: Where intermediate values may have a sharding constraint.
    """
    sizes = ((nbytes(jax.typeof(array)), bytes_on_device(array)) for array in arrays)
    parts = [whole // part for whole, part in sizes if part]
    shardings = [sharding_of(eqn) for eqn, _ in walk(program.jaxpr)] if program else []
    parts += [number_of_shards(s.spec, s.mesh.shape) for s in shardings if s is not None]
    return max(parts, default=1)
