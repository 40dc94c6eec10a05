"""Which arguments of a program could be donated, and the bytes of results that fit into them."""

import collections
from typing import Any

import jax

from jrc._tree import is_traced
from jrc.remat._gradient.compiled_memory import bytes_on_device
from jrc.remat._report.lowered_function import input_shardings


def donatable(
    lowered: jax.stages.Lowered, compiled: Any, args: tuple[Any, ...]
) -> tuple[int, tuple[int, ...]]:
    """Return bytes of results that could lie in the memory of arguments of their type, and do not.

    Scalars and arguments that the program leaves out do not count; an array that is given twice
    counts once.

    Args:
        lowered: The lowered function.
        compiled: The same compiled; `None` where the compiler refuses it.
        args: Its arguments as they were given.

    Returns:
        The bytes on one device, and the arguments to donate for it, those that are donated already
        among them; none where it cannot be told which arrays are whose.
    """
    infos = jax.tree.leaves(lowered.args_info)
    made = collections.Counter(map(_type, jax.tree.leaves(lowered.out_info)))
    made -= collections.Counter(_type(each) for each in infos if each.donated)
    owners = [(i, x) for i, arg in enumerate(args) for x in jax.tree.leaves(arg) if is_traced(x)]
    known = len(owners) == len(infos)
    owners = owners if known else [(-1, each) for each in infos]
    if compiled is None:
        shardings = [getattr(x, "sharding", None) for _, x in owners]
    else:
        shardings = input_shardings(lowered, compiled)
    donated = [(owner, x) for (owner, x), each in zip(owners, infos, strict=True) if each.donated]
    found, counted, size = {owner for owner, _ in donated}, {id(x) for _, x in donated}, 0
    for (owner, x), each, sharding in zip(owners, infos, shardings, strict=True):
        is_left_out = sharding is None and compiled is not None
        is_counted = isinstance(x, jax.Array) and id(x) in counted
        if each.shape and made[_type(each)] > 0 and not (each.donated or is_left_out or is_counted):
            made[_type(each)] -= 1
            size += bytes_on_device(jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding))
            found.add(owner)
            counted.add(id(x))
    return size, tuple(sorted(found)) if size and known else ()


def _type(array: Any) -> tuple[Any, ...]:
    return tuple(array.shape), str(array.dtype)
