"""The leaves of a state: their places in the tree, and whether they can be saved."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrc._errors import running_name
from jrc._tree import path_name


class Leaf(NamedTuple):
    """A leaf of a state.

    Attributes:
        place: Its exact path in the tree, `['layer_0']['w']`.
        name: Its path as users write it, `layer_0/w`.
        value: The array.
    """

    place: str
    name: str
    value: Any


def leaves_of(tree: Any) -> list[Leaf]:
    """Return every leaf in tree order; `None` counts, so that trees with and without it differ."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is None)
    return [Leaf(jax.tree_util.keystr(p), path_name(p), leaf) for p, leaf in pairs]


def check_type(
    leaf: Leaf, rule: str = "every leaf of state must be an array of numbers or keys"
) -> None:
    """Raise if a leaf cannot be saved."""
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
    remedy = "Convert it with jnp.asarray, or take it out of the state."
    if traced:
        what, remedy = "a tracer", f"Call {running_name()} outside of jax.jit and other transforms."
    raise TypeError(f"{rule}, got {what} at {_name(leaf)!r}. {remedy}")


def check_not_donated(leaf: Leaf) -> None:
    """Raise if the array was deleted, as those of a state that was donated to a step are."""
    if isinstance(leaf.value, jax.Array) and leaf.value.is_deleted():
        raise ValueError(
            f"state must not be donated, got {_name(leaf)!r}, an array that a step has "
            "deleted. Save the state that the step returned."
        )


def check_place(leaf: Leaf) -> None:
    """Raise if in a run of several processes a `jax.Array` lies on one of them only."""
    value = leaf.value
    if jax.process_count() > 1 and isinstance(value, jax.Array) and value.is_fully_addressable:
        raise ValueError(
            f"every jax.Array of state must lie on all {jax.process_count()} processes, "
            f"got {leaf.name!r} on process {jax.process_index()} only. Place it on the mesh, as "
            "jrc.init_state does, or convert it to NumPy, of which process 0's value is saved."
        )


def _name(leaf: Leaf) -> str:
    return leaf.name or "(the tree itself)"


def _is_savable(dtype: Any) -> bool:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return True
    numbers = jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)
    return numbers and np.dtype(dtype).isnative
