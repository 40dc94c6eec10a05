"""How XLA splits the values of a program over devices, as far as that is said."""

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax

from jrc._jaxpr import (
    Program,
    Split,
    SplitValues,
    mesh_of_shard_map,
    nbytes,
    shape_of,
    sharding_of,
    split_of_spec,
    walk,
)
from jrc._specs import axes_of, number_of_shards, spec_of
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


def is_in_parts(program: Program) -> bool:
    """Return whether a program runs on a mesh of several devices, or has one inside."""
    mapped = (mesh_of_shard_map(eqn) for eqn, _ in walk(program.jaxpr))
    meshes = (jax.sharding.get_abstract_mesh(), *mapped)
    return any(mesh is not None and math.prod(mesh.shape.values()) > 1 for mesh in meshes)


def split_values(
    program: Program, inputs: Sequence[Any], parameters: Collection[int]
) -> SplitValues | None:
    """Return how the values of a program are split; `None` where no argument says it.

    Args:
        program: The program, without `jit` calls.
        inputs: Its inputs: arrays, or shapes with shardings.
        parameters: The positions of those that are differentiated. The others are data: chunks are
            made of what each device has of these.
    """
    given: dict[Any, Split] = {}
    names: dict[str, int] = {}
    sizes: dict[str, int] = {}
    data = []
    for i, (v, x) in enumerate(zip(program.jaxpr.invars, inputs, strict=True)):
        spec = spec_of(x)
        if axes_of(spec):
            sizes |= dict(x.sharding.mesh.shape) if hasattr(x, "sharding") else {}
            given[v] = split_of_spec(spec, tuple(() for _ in shape_of(v)))
        if i not in parameters:
            data.append(v)
            names |= {name: sizes[name] for name in axes_of(spec) if sizes.get(name, 1) > 1}
    return SplitValues(program, given, data, names) if given else None


def split_values_of_call(
    program: Program, inputs: Sequence[Any], counts: Sequence[int]
) -> SplitValues | None:
    """Return how the values of a function's program are split, where none is differentiated.

    Arguments whose arrays are split along their first axis alone, and all of one size, are data.
    Where these sizes differ, the last argument's are: parameters come first.

    Args:
        program: The program, without `jit` calls.
        inputs: Its inputs: the arrays that the function closes over, then those of its arguments.
        counts: How many of them each argument has.
    """
    ends = list(itertools.accumulate(counts, initial=len(inputs) - sum(counts)))
    places = list(itertools.starmap(range, itertools.pairwise(ends)))
    sizes = [_size_of_data([inputs[i] for i in each]) for each in places]
    size = next(filter(None, reversed(sizes)), None)
    found = zip(places, sizes, strict=True)
    data = {i for each, n in found if n is not None and n == size for i in each}
    return split_values(program, inputs, [i for i in range(len(inputs)) if i not in data])


def _size_of_data(arrays: Iterable[Any]) -> int | None:
    """The size of the first axis, where arrays that are split are split along it alone."""
    specs = [(array, spec_of(array)) for array in arrays]
    split_ones = [(array, spec) for array, spec in specs if axes_of(spec)]
    found = {array.shape[0] if len(spec) == 1 else None for array, spec in split_ones}
    return found.pop() if len(found) == 1 else None
