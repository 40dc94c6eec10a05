"""Barriers that keep XLA from merging a recomputation with the first computation."""

from typing import Any

import jax
import jax.numpy as jnp

from jrc._tree import is_typed_key


def barrier(tree: Any) -> Any:
    """Apply one `optimization_barrier` to all numbers of a tree, the data of typed keys included.

    A computation that depends only on values without a barrier would be merged with the forward
    pass, and its result saved.
    """
    leaves, treedef = jax.tree.flatten(tree)
    # `jax.vjp` accepts Python numbers as cotangents.
    leaves = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in leaves]
    data = [jax.random.key_data(x) if is_typed_key(x) else x for x in leaves]
    behind = iter(jax.lax.optimization_barrier([x for x in data if _is_numeric(x)]))
    return treedef.unflatten(
        _as_key(x, next(behind)) if _is_numeric(each) else x
        for x, each in zip(leaves, data, strict=True)
    )


def _is_numeric(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == jnp.bool_


def _as_key(leaf: Any, data: Any) -> Any:
    """The data as a typed key if `leaf` is one."""
    if not is_typed_key(leaf):
        return data
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
