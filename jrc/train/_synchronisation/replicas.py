"""Reductions over the replicas of a step."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jrc._ring import ring_all_reduce_bytes
from jrc._tree import is_typed_key
from jrc._typing import Array, PyTree


class Replicas:
    """Reductions over the replica axes of a step; without an axis, a single replica."""

    def __init__(self, axis: tuple[str, ...] | None) -> None:
        self.axis = axis
        self.rank = jnp.int32(0) if axis is None else jax.lax.axis_index(axis)

    @property
    def first(self) -> str | None:
        """The axis along which replicas differ."""
        return None if self.axis is None else self.axis[0]

    @property
    def inside(self) -> "Replicas":
        """The reductions over the axis that is averaged first."""
        return Replicas(self.axis[1:] or None) if self.axis else self

    @property
    def rows(self) -> int:
        """The number of replicas that differ."""
        return 1 if self.axis is None else jax.lax.axis_size(self.axis[0])

    def mean(self, x: Any) -> Any:
        return x if self.axis is None else jax.lax.pmean(x, self.axis)

    def total(self, x: Any) -> Any:
        return x if self.axis is None else jax.lax.psum(x, self.axis)

    def bytes_of_mean(self, arrays: Sequence[Any], itemsize: int | None = None) -> float:
        """Return the bytes that a device sends for a mean, in a ring.

        Args:
            arrays: This replica's.
            itemsize: Bytes of an entry; `None` for those of its dtype.
        """
        if self.axis is None:
            return 0.0
        size = sum(x.size * (itemsize or x.dtype.itemsize) for x in arrays)
        return ring_all_reduce_bytes(size, jax.lax.axis_size(self.axis), itemsize=1)

    def shared(self, x: Array) -> Array:
        """Return one value for all: the mean of floats, replica 0's integers, bools and keys."""
        if is_typed_key(x):
            data = self.shared(jax.random.key_data(x))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return self.mean(x)
        first = jnp.where(self.rank == 0, x, jnp.zeros_like(x))
        return self.total(first.astype(jnp.int32) if x.dtype == bool else first).astype(x.dtype)


def norm_of(grads: PyTree) -> Array:
    """Return the L2 norm of a gradient, in float32: squares in half precision overflow."""
    return optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))
