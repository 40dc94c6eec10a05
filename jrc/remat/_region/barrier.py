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
def gradients_in_order(data: list[Any], weights: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return arrays as they are; no gradient of one is read before all of them are computed.

    What made the data is then differentiated when the gradients of the weights are there, and what
    these are computed from need not be kept.

    Args:
        data: What a part of a program reads of other parts.
        weights: What it reads of the program's inputs.
    """
    return data, weights


def _in_order(primals: Any, tangents: Any) -> tuple[Any, Any]:
    flowing = [
        [i for i, each in enumerate(group) if not isinstance(each, SymbolicZero)]
        for group in tangents
    ]
    if not all(flowing):
        return primals, tangents
    # Transposed it is a barrier of gradients. XLA drops those that are not read.
    behind = jax.lax.optimization_barrier(
        [[group[i] for i in at] for group, at in zip(tangents, flowing, strict=True)]
    )
    out = [list(group) for group in tangents]
    for group, at, new in zip(out, flowing, behind, strict=True):
        for i, each in zip(at, new, strict=True):
            group[i] = each
    return primals, tuple(out)


gradients_in_order.defjvp(_in_order, symbolic_zeros=True)


def _is_numeric(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == jnp.bool_


def _as_key(leaf: Any, data: Any) -> Any:
    """The data as a typed key if `leaf` is one."""
    if not is_typed_key(leaf):
        return data
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
