"""A function as it is, lowered; with arguments donated, and what could be."""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jrc._jaxpr import nbytes
from jrc._tree import is_traced, split


def lowered_function(
    fn: Callable[..., Any], args: tuple[Any, ...], donated: Sequence[int] = ()
) -> tuple[jax.stages.Lowered, Any]:
    """Return a function lowered, and its program where that can be had.

    Args:
        fn: The function; one with a method `lower`, as `jax.jit` returns it, is lowered by that.
        args: Its arguments.
        donated: The arguments whose arrays are donated besides those that the function donates;
            these must be named too.
    """
    if not donated:
        if hasattr(fn, "trace"):
            traced = fn.trace(*args)
            return traced.lower(), traced.jaxpr
        if hasattr(fn, "lower"):
            return fn.lower(*args), None
    arrays, skeleton = split(args)

    def run(*given: Any) -> list[Any]:
        return split(fn(*skeleton.fill(given)))[0]

    owners = [i for i, arg in enumerate(args) for _ in split(arg)[0]]
    flat = [k for k, owner in enumerate(owners) if owner in donated]
    traced = jax.jit(run, donate_argnums=flat).trace(*arrays)
    return traced.lower(), traced.jaxpr


def donatable(lowered: jax.stages.Lowered, args: tuple[Any, ...]) -> tuple[int, tuple[int, ...]]:
    """Return bytes of results that could lie in the memory of arguments of their type, and do not.

    Args:
        lowered: The lowered function.
        args: Its arguments.

    Returns:
        The bytes, and the arguments to donate for it, those that are donated already among them;
        none where it cannot be told which arrays are whose.
    """
    infos = jax.tree.leaves(lowered.args_info)
    made = collections.Counter(map(_key, jax.tree.leaves(lowered.out_info)))
    made -= collections.Counter(_key(each) for each in infos if each.donated)
    owners = [i for i, arg in enumerate(args) for x in jax.tree.leaves(arg) if is_traced(x)]
    known = len(owners) == len(infos)
    size, found = 0, {owners[k] for k, each in enumerate(infos) if each.donated and known}
    for k, each in enumerate(infos):
        if not each.donated and made[_key(each)] > 0:
            made[_key(each)] -= 1
            size += nbytes(each)
            found |= {owners[k]} if known else set()
    return size, tuple(sorted(found)) if size else ()


def _key(array: Any) -> tuple[Any, ...]:
    return tuple(array.shape), str(array.dtype), nbytes(array)
