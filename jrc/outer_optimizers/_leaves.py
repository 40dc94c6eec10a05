"""The leaves of a parameter tree that have entries, and trees made of new ones."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jrc._tree import sum_dtype
from jrc._typing import Array, PyTree


def shapes_of(params: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the leaves that have entries."""
    shapes = (tuple(jnp.shape(leaf)) for leaf in jax.tree.leaves(params))
    return tuple(shape for shape in shapes if math.prod(shape))


def size_of(params: Any) -> int:
    """Return the number of entries of all leaves."""
    return sum(math.prod(shape) for shape in shapes_of(params))


def leaves_with_entries(tree: PyTree) -> list[Array]:
    """Return the leaves of `shapes_of`."""
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.size(leaf)]


def with_leaves(tree: PyTree, new: Sequence[Array]) -> PyTree:
    """Return the tree with new leaves in the places of those that have entries."""
    fresh = iter(new)
    return jax.tree.map(lambda leaf: next(fresh) if jnp.size(leaf) else leaf, tree)


def zeros_like(params: PyTree) -> PyTree:
    """Return float32 zeros in the shapes of the parameters."""
    return jax.tree.map(lambda leaf: jnp.zeros(jnp.shape(leaf), jnp.float32), params)


def stepped(params: PyTree, directions: Sequence[Array], step: Callable[[Array], Array]) -> PyTree:
    """Return `params - step(direction)`, computed in at least float32, in the parameters' dtypes.

    Args:
        params: The parameters.
        directions: One for each leaf with entries.
        step: Of a direction the difference.

    Returns:
        The new parameters.
    """
    pairs = zip(leaves_with_entries(params), directions, strict=True)
    wide = lambda x: x.astype(sum_dtype(x.dtype))  # noqa: E731
    return with_leaves(params, [(wide(x) - step(d)).astype(x.dtype) for x, d in pairs])
