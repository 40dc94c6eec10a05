"""Reductions over the replicas of a step."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jrc._layout import Layout
from jrc._tree import has_wide_range, is_typed_key, sum_dtype
from jrc._typing import Array, PyTree
from jrc.train._optax import differentiated


class Replicas:
    """Reductions over the replica axes of a step.

    Attributes:
        layout: The layout of the step.
        names: The axes.
        axis: The same where they are bound; `None` for a single replica, or one that XLA splits.
    """

    def __init__(self, layout: Layout, names: tuple[str, ...], is_mapped: bool) -> None:
        self.layout, self.names = layout, names
        self.axis = names if names and is_mapped else None
        self.rank = jnp.int32(0) if self.axis is None else jax.lax.axis_index(self.axis)

    @property
    def first(self) -> str | None:
        """The axis along which replicas differ."""
        return None if self.axis is None else self.axis[0]

    @property
    def inside(self) -> "Replicas":
        """The reductions over the axis that is averaged first."""
        return Replicas(self.layout, self.names[1:], self.axis is not None)

    @property
    def rows(self) -> int:
        """The number of replicas that differ."""
        return 1 if self.axis is None else jax.lax.axis_size(self.axis[0])

    def mean(self, x: Any) -> Any:
        """Return the means of arrays; the sum of float16 over replicas may exceed its range."""
        if self.axis is None:
            return x
        means = jax.lax.pmean(jax.tree.map(lambda each: each.astype(_dtype(each)), x), self.axis)
        return jax.tree.map(lambda mean, each: mean.astype(each.dtype), means, x)

    def total(self, x: Any) -> Any:
        return x if self.axis is None else jax.lax.psum(x, self.axis)

    def bytes_of_mean(self, tree: PyTree, itemsize: int | None = None) -> float:
        """Return the bytes that a device sends for a mean, in a ring.

        Args:
            tree: Arrays in the structure of the parameters, `None` for one that is not averaged.
            itemsize: Bytes of an entry; `None` for those of the dtype that is summed.
        """
        is_none = lambda x: x is None  # noqa: E731
        leaves = jax.tree.leaves(tree, is_leaf=is_none)
        specs: list[Any] = [PartitionSpec()] * len(leaves)
        if self.layout.params is not None:
            specs = jax.tree.leaves(differentiated(self.layout.params), is_leaf=is_none)
        pairs = [(x, spec) for x, spec in zip(leaves, specs, strict=True) if x is not None]
        arrays = [jax.ShapeDtypeStruct(x.shape, _dtype(x)) for x, _ in pairs]
        lies = [spec for _, spec in pairs]
        return self.layout.bytes_to_reduce(arrays, lies, self.names, itemsize)

    def shared(self, x: Array) -> Array:
        """Return one value for all: the mean of floats, replica 0's integers, bools and keys."""
        if self.axis is None:
            return x
        if is_typed_key(x):
            data = self.shared(jax.random.key_data(x))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return self.mean(x)
        first = jnp.where(self.rank == 0, x, jnp.zeros_like(x))
        return self.total(first.astype(jnp.int32) if x.dtype == bool else first).astype(x.dtype)


def _dtype(x: Any) -> Any:
    """The type in which an array is summed over replicas."""
    return x.dtype if has_wide_range(x) else sum_dtype(x.dtype)


def norm_of(grads: PyTree) -> Array:
    """Return the L2 norm of a gradient, in float32: squares in half precision overflow."""
    sizes = jax.tree.map(lambda g: jnp.abs(g) if jnp.iscomplexobj(g) else g, grads)
    return optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), sizes))
