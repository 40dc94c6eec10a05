"""The leaves of a state: their places in the tree, and whether they can be saved."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrc._tree import path_name


class Leaf(NamedTuple):
    """A leaf with its exact place in the tree, and with its name for people."""

    place: str
    name: str
    value: Any


def leaves_of(tree: Any) -> list[Leaf]:
    """Every leaf in tree order; `None` counts, so that trees with and without it differ."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is None)
    return [Leaf(jax.tree_util.keystr(p), path_name(p), leaf) for p, leaf in pairs]


def check_type(
    leaf: Leaf, who: str = "jrc.save", rule: str = "every leaf is an array of numbers or keys"
) -> None:
    value = leaf.value
    if value is None:
        return
    array = isinstance(value, jax.Array | np.ndarray | np.generic)
    traced = isinstance(value, jax.core.Tracer)
    if array and not traced and _is_savable(value.dtype):
        return
    what = (
        f"{type(value).__name__}[{value.dtype}]" if array else f"{type(value).__name__} {value!r}"
    )
    way_out = "Make it one with jnp.asarray, or take it out of the state."
    if traced:
        what, way_out = "traced", "Call it outside of jax.jit and the like."
    raise TypeError(f"{who}: {rule}; {_called(leaf)!r} is {what}. {way_out}")


def check_there(leaf: Leaf) -> None:
    """A step that donates its state leaves arrays behind that are no more."""
    if isinstance(leaf.value, jax.Array) and leaf.value.is_deleted():
        raise ValueError(
            f"jrc.save: {_called(leaf)!r} was donated to a step and is gone. Save the state that "
            "the step returned."
        )


def check_place(leaf: Leaf) -> None:
    """With several processes an array lies on all of them; a NumPy array lies nowhere."""
    value = leaf.value
    if jax.process_count() > 1 and isinstance(value, jax.Array) and value.is_fully_addressable:
        raise ValueError(
            f"jrc.save: in a run of {jax.process_count()} processes a jax.Array lies on all of "
            f"them; {leaf.name!r} lies on process {jax.process_index()} alone. Place it on the "
            "mesh, as jrc.init_state does, or make it a NumPy array, of which process 0's is saved."
        )


def _called(leaf: Leaf) -> str:
    return leaf.name or "(the tree itself)"


def _is_savable(dtype: Any) -> bool:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return True
    numbers = jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)
    return numbers and np.dtype(dtype).isnative
