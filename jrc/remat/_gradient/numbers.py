"""Which numbers among the arguments are traced, and which reach the function as they are.

Numbers are traced as under `jax.jit`, so that they may change. A module of a library may have
integers and flags as leaves on which a shape or a branch depends: a function that cannot be traced
with tracers in their place gets the numbers themselves.

>>> numbers = dict(length=3, scale=2.0)
>>> fn = lambda x, n: n["scale"] * x.reshape(n["length"], -1).sum()
>>> settled(fn, (jax.numpy.ones(6), numbers), {}, lambda path, leaf: True)[0][1]
{'length': 3, 'scale': Array(2., dtype=float32, weak_type=True)}
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrc._errors import name_of, running_name
from jrc._tree import is_number, is_traced, path_name

_logger = logging.getLogger("jrc")
_STATIC = (
    "%s: `%s` needs the values of numbers among its arguments, which are passed as they are: %s. "
    "Pass an array for one that changes from call to call."
)


def settled(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    traceable: Callable[[Sequence[Any], Any], bool],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments in which NumPy arrays, and numbers that are traced, are JAX arrays.

    Of three ways the first is taken in which the function can be traced: all numbers traced;
    integers and flags as they are; all as they are. If none works it is the second: where the
    function is called, its error is the user's own, and not that an integer is traced. Which
    numbers stay as they are is logged to `jrc`.

    Args:
        fn: The function; it is called only if there are numbers that may be traced.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        traceable: Whether a number may be traced, from the path of its leaf, which begins with
            the position or the name of the argument, and the number.

    Returns:
        `args` and `kwargs`.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path((args, dict(kwargs)))
    leaves = [leaf for _, leaf in paths]
    names = [path[1:] for path, _ in paths]
    numbers = [i for i, x in enumerate(leaves) if _is_scalar(x) and traceable(names[i], x)]
    if not numbers:
        return treedef.unflatten(_with_arrays(leaves, ()))
    ways = [numbers, [i for i in numbers if not _is_integer(leaves[i])], []]
    traced = next((way for way in ways if _can_trace(fn, treedef, leaves, way)), ways[1])
    if static := sorted({*numbers} - {*traced}):
        text = ", ".join(f"{path_name(names[i])} = {leaves[i]!r}" for i in static)
        _logger.info(_STATIC, running_name(), name_of(fn), text)
    return treedef.unflatten(_with_arrays(leaves, traced))


def _is_scalar(leaf: Any) -> bool:
    """Return whether a leaf is a number of Python or NumPy, and no array."""
    return is_number(leaf) and not isinstance(leaf, jax.Array | np.ndarray)


def _is_integer(leaf: Any) -> bool:
    return isinstance(leaf, bool | int | np.bool_ | np.integer)


def _with_arrays(leaves: Sequence[Any], traced: Sequence[int]) -> list[Any]:
    """Return the leaves, those numbers and all NumPy arrays as JAX arrays."""
    chosen = set(traced)
    return [
        jnp.asarray(x) if i in chosen or (isinstance(x, np.ndarray) and is_number(x)) else x
        for i, x in enumerate(leaves)
    ]


def _can_trace(
    fn: Callable[..., Any], treedef: Any, leaves: Sequence[Any], traced: Sequence[int]
) -> bool:
    """Return whether a function can be traced with these numbers and all arrays as tracers."""
    new = _with_arrays(leaves, traced)
    at = [i for i, x in enumerate(new) if is_traced(x)]

    def call(arrays: Sequence[Any]) -> None:
        values = dict(zip(at, arrays, strict=True))
        args, kwargs = treedef.unflatten(values.get(i, x) for i, x in enumerate(new))
        fn(*args, **kwargs)

    try:
        with jax.disable_jit(False):
            jax.eval_shape(call, [new[i] for i in at])
    except Exception:  # noqa: BLE001
        # Libraries raise errors of any type; the caller meets it again, and says whose it is.
        return False
    return True
