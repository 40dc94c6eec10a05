"""Collectives over the replica axis. `None` is one replica."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jrc._mesh_axes import is_bound, is_tracked, num_replicas, varies
from jrc._typing import Array


def is_already_reduced(gradient: Array, axis: str | None) -> bool:
    """Whether types are tracked along the axis and the gradient is equal on every replica."""
    if axis is None or not is_tracked(axis):
        return False
    return not varies(gradient, axis)


def as_local(x: Array, axis: str | None) -> Array:
    """Return `x` typed as varying, so that loop carries and branches keep one type."""
    if axis is None or not is_bound(axis) or varies(x, axis):
        return x
    return lax.pcast(x, axis, to="varying")


def total(x: Array, axis: str | None) -> Array:
    """Return the sum of `x` over the replicas, equal on each of them."""
    return x if axis is None else lax.psum(x, axis)


def gather(x: Array, axis: str | None) -> Array:
    """Return the `x` of every replica, stacked in rank order, equal on each of them."""
    if axis is None:
        return x[None]
    # An ordinary all_gather is typed as varying, and shard_map would refuse it as replicated.
    rows = partial(lax.all_gather, axis_name=axis, to="invarying")
    # XLA for TPUs makes an all-reduce, of twice the bytes, of a small gather whose rows do not
    # fill tiles, but only if it is along the leading dimension.
    return lax.platform_dependent(
        x, tpu=lambda x: jnp.moveaxis(rows(x, axis=x.ndim), -1, 0), default=rows
    )


def exchange_rows(rows: Array, axis: str | None) -> Array:
    """Send row r to replica r; return the rows that this replica received, in rank order."""
    return rows if axis is None else lax.all_to_all(rows, axis, 0, 0)


def rank(axis: str | None) -> Array:
    """Return the number of this replica, `int32[]`."""
    return jnp.int32(0) if axis is None else lax.axis_index(axis)


def dense_mean(tensors: Sequence[Array], axis: str | None) -> list[Array]:
    """Return means of float32 tensors over the replicas, in one all-reduce.

    Tensors that are split over axes that are not manual are reduced one by one: joined, they would
    have to be gathered. Those of other varying types have an all-reduce for each type.

    Args:
        tensors: Local ones, of any shapes.
        axis: The replica axis.

    Returns:
        The means, equal on every replica.
    """
    if not tensors or axis is None:
        return list(tensors)
    mesh = jax.sharding.get_abstract_mesh()
    if any(mesh.shape[name] > 1 for name in (*mesh.auto_axes, *mesh.explicit_axes)):
        return [total(tensor, axis) / num_replicas(axis) for tensor in tensors]
    kinds = [frozenset(jax.typeof(tensor).mat.varying) for tensor in tensors]
    means = {
        kind: iter(
            _joined_mean([x for x, k in zip(tensors, kinds, strict=True) if k == kind], axis)
        )
        for kind in dict.fromkeys(kinds)
    }
    return [next(means[kind]) for kind in kinds]


def _joined_mean(tensors: Sequence[Array], axis: str) -> list[Array]:
    flat = jnp.concatenate([tensor.reshape(-1) for tensor in tensors])
    mean = total(flat, axis) / num_replicas(axis)
    means, start = [], 0
    for tensor in tensors:
        means.append(mean[start : start + tensor.size].reshape(tensor.shape))
        start += tensor.size
    return means
