"""What keeps XLA from merging a re-run with the first run."""

from typing import Any

import jax
import jax.numpy as jnp

from jrc._tree import is_typed_key


def barrier(tree: Any) -> Any:
    """`optimization_barrier` on everything that XLA computes with, the words of typed keys too.

    What only depends on values left out here would be merged with the forward pass and kept.
    """
    leaves, treedef = jax.tree.flatten(tree)
    # `jax.vjp` lets a cotangent be a Python number.
    leaves = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in leaves]
    words = [jax.random.key_data(x) if is_typed_key(x) else x for x in leaves]
    held = iter(jax.lax.optimization_barrier([x for x in words if _is_data(x)]))
    return treedef.unflatten(
        _like(x, next(held)) if _is_data(word) else x for x, word in zip(leaves, words, strict=True)
    )


def _is_data(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == jnp.bool_


def _like(leaf: Any, words: Any) -> Any:
    if not is_typed_key(leaf):
        return words
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
