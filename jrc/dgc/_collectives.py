"""The replica axis: its size, its types, and the collectives over it. `None` is one replica."""

import jax
import jax.numpy as jnp
from jax import lax

from jrc._typing import Array

AxisName = str | tuple[str, str]
"""An axis, or a pair `(inner, outer)`: dense inside, sparse between."""


def is_pair(axis_name: object) -> bool:
    """Whether this names two axes, `(inner, outer)`."""
    pair = isinstance(axis_name, tuple) and len(axis_name) == 2
    return pair and all(isinstance(name, str) for name in axis_name) and len(set(axis_name)) == 2


def replica_axis(axis_name: AxisName, who: str = "jrc.dgc.replica_axis") -> str:
    """The axis along which u and v differ: of a pair the outer one."""
    if isinstance(axis_name, str):
        return axis_name
    if is_pair(axis_name):
        return axis_name[1]
    raise ValueError(
        f"{who}: axis_name must be the name of one axis or a tuple (inner, outer) of two, got "
        f"{axis_name!r}; give it as to the compression"
    )


def is_bound(axis: str | None) -> bool:
    """Whether the trace runs under a `shard_map` or `pmap` that names this axis."""
    try:
        axis is None or lax.axis_size(axis)
    except NameError:
        return False
    return True


def num_replicas(axis: str | None) -> int:
    """The number of replicas along the axis.

    Args:
        axis: Name of the replica axis, `None` for one replica.

    Returns:
        The axis size, 1 for `None`.

    Raises:
        ValueError: When nothing binds the axis.
    """
    if not is_bound(axis):
        raise ValueError(
            f"jrc.scale_by_dgc: axis_name={axis!r} must be bound where update runs, and is not; "
            f"call it inside jax.shard_map over a mesh with axis {axis!r} or inside "
            f"jax.pmap(..., axis_name={axis!r}), or pass axis_name=None for one replica"
        )
    return 1 if axis is None else lax.axis_size(axis)


def varies(x: Array, axis: str) -> bool:
    """Whether the type of `x` says that it differs between the replicas."""
    return axis in jax.typeof(x).mat.varying


def is_already_reduced(gradient: Array, axis: str | None) -> bool:
    """Whether types are tracked over the axis and say that the gradient is equal everywhere."""
    if axis is None or not varies(lax.axis_index(axis), axis):
        return False
    return not varies(gradient, axis)


def as_local(x: Array, axis: str | None) -> Array:
    """`x` typed as different on each replica, so that carries and branches keep one type."""
    if axis is None or not is_bound(axis) or varies(x, axis):
        return x
    return lax.pcast(x, axis, to="varying")


def total(x: Array, axis: str | None) -> Array:
    """The sum of `x` over the replicas, the same on each of them."""
    return x if axis is None else lax.psum(x, axis)


def gather(x: Array, axis: str | None) -> Array:
    """The `x` of every replica, stacked in rank order, the same on each of them."""
    # An ordinary all_gather is typed as varying, and shard_map would refuse it as replicated.
    return x[None] if axis is None else lax.all_gather(x, axis, to="invarying")


def swap(rows: Array, axis: str | None) -> Array:
    """Row r goes to replica r; its own row of every replica, in rank order."""
    return rows if axis is None else lax.all_to_all(rows, axis, 0, 0)


def rank(axis: str | None) -> Array:
    """The number of this replica."""
    return jnp.int32(0) if axis is None else lax.axis_index(axis)


def all_finite(gradients: list[Array], axis: str | None) -> Array:
    """Whether every entry of every gradient is finite on every replica: one scalar reduction."""
    if not gradients:
        return jnp.bool_(True)
    # A maximum keeps NaN, and XLA makes it in one pass without an array of booleans.
    tops = [jnp.max(jnp.abs(gradient), initial=0.0) for gradient in gradients]
    finite = jnp.isfinite(jnp.stack(tops)).all()
    return total((~finite).astype(jnp.int32), axis) == 0
