"""Collectives over the replica axis, its size, and what differs along it. `None` is one replica."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jrc._tree import all_finite
from jrc._typing import Array

AxisName = str | tuple[str, str]
"""One mesh axis, or a pair `(inner, outer)`: means along inner, compression along outer."""


def is_pair(axis_name: object) -> bool:
    """Whether this is a pair of two axis names, `(inner, outer)`."""
    pair = isinstance(axis_name, tuple) and len(axis_name) == 2
    return pair and all(isinstance(name, str) for name in axis_name) and len(set(axis_name)) == 2


def replica_axis(axis_name: AxisName) -> str:
    """Return the axis along which u and v differ: of a pair the outer one.

    Args:
        axis_name: One axis name, or a pair `(inner, outer)`.

    Returns:
        The axis name.

    Raises:
        ValueError: If it is neither.
    """
    if isinstance(axis_name, str):
        return axis_name
    if is_pair(axis_name):
        return axis_name[1]
    raise ValueError(
        "axis_name must be the name of one axis or a pair (inner, outer), got "
        f"{axis_name!r}. Pass the axis_name of the compression."
    )


def names_in(axis_name: AxisName | None) -> set[str]:
    """Return the axes that an `axis_name` names: none, one or two."""
    return {axis_name} if isinstance(axis_name, str) else set(axis_name or ())


def is_bound(axis: str | None) -> bool:
    """Whether the trace runs under a `shard_map` or `pmap` that names this axis."""
    try:
        axis is None or lax.axis_size(axis)
    except NameError:
        return False
    return True


def num_replicas(axis: str | None) -> int:
    """Return the number of replicas along the axis.

    Args:
        axis: Name of the replica axis, `None` for one replica.

    Returns:
        The axis size, 1 for `None`.

    Raises:
        ValueError: When nothing binds the axis.
    """
    if not is_bound(axis):
        raise ValueError(
            "axis_name must be an axis that is bound where update runs, got "
            f"axis_name={axis!r}. Call update inside jax.shard_map over a mesh with axis {axis!r} "
            f"or inside jax.pmap(..., axis_name={axis!r}), or pass axis_name=None for one replica."
        )
    return 1 if axis is None else lax.axis_size(axis)


def bound_axes(axis: str | None) -> tuple[str, ...]:
    """Return the replica axis and all other manual axes of the trace."""
    own = () if axis is None else (axis,)
    others = jax.sharding.get_abstract_mesh().manual_axes
    return (*own, *(name for name in others if name != axis and is_bound(name)))


def varies(x: Array, axis: str) -> bool:
    """Whether the type of `x` is varying: its value differs between the replicas."""
    return axis in jax.typeof(x).mat.varying


def is_tracked(axis: str) -> bool:
    """Whether types say what varies along the axis, as with `check_vma=True`."""
    return is_bound(axis) and varies(lax.axis_index(axis), axis)


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


def finite_everywhere(gradients: list[Array], axes: Sequence[str]) -> Array:
    """Whether every entry of every gradient is finite on every device of these axes, `bool[]`.

    One scalar all-reduce: the devices take a step together or not at all.
    """
    if not gradients:
        return jnp.bool_(True)
    bad = (~all_finite(gradients)).astype(jnp.int32)
    # What types say is equal along an axis cannot be added up over it, and need not be.
    over = tuple(axis for axis in axes if varies(bad, axis) or not is_tracked(axis))
    return (lax.psum(bad, over) if over else bad) == 0


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
