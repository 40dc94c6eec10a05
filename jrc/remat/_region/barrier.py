"""Barriers that keep XLA from merging a recomputation with the first computation."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

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


@jax.custom_jvp
def gradients_in_order(values: list[Any]) -> list[Any]:
    """Return arrays as they are; no gradient of one is read before all of them are computed.

    Where some were made by an earlier part of a program, and others are weights, the earlier part
    is differentiated when the gradients of the weights are there: what these are computed from need
    not be kept. In forward mode the tangents pass a barrier likewise.

    Args:
        values: What a part of a program reads. What later parts read is to be the result.
    """
    return values


def _in_order(primals: Any, tangents: Any) -> tuple[Any, Any]:
    (values,), (given,) = primals, tangents
    flowing = [i for i, each in enumerate(given) if not isinstance(each, SymbolicZero)]
    if len(flowing) < 2:
        return values, given
    # JAX cannot accumulate gradients in references (`with_refs`) right behind a barrier.
    apart = [given[i] + jnp.zeros_like(given[i]) for i in flowing]
    # Transposed it is a barrier of gradients. XLA drops those that are not read.
    behind = dict(zip(flowing, jax.lax.optimization_barrier(apart), strict=True))
    return values, [behind.get(i, each) for i, each in enumerate(given)]


gradients_in_order.defjvp(_in_order, symbolic_zeros=True)


def _is_numeric(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == jnp.bool_


def _as_key(leaf: Any, data: Any) -> Any:
    """The data as a typed key if `leaf` is one."""
    if not is_typed_key(leaf):
        return data
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
