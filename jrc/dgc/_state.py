"""The state of the transform, and how it is laid out over the replicas."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jrc._tree import is_number, is_traced
from jrc._typing import Array, Count, Leaf, PyTree, Scalar
from jrc.dgc._collectives import AxisName, as_local, replica_axis


class DGCState(NamedTuple):
    """State of `scale_by_dgc`.

    Each replica has its own `u` and `v`; all else is equal on every replica. A field has an
    `optax.MaskedNode()` in the place of each leaf that it has no array for.

    Attributes:
        step: DGC steps taken, `int32[]`.
        u: Local velocity of each compressed leaf, `float32[1, n]`: a row for each replica; under
            `shard_map` a replica sees its own.
        v: Accumulated, unsent gradient of each compressed leaf, `float32[1, n]` likewise.
        velocity: Momentum of each leaf on the dense path, float32 in the leaf's shape.
        skipped: Steps skipped for a gradient that was not finite, `int32[]`.
        density: Share of the compressed leaves' entries that the last step sent, `float32[]`.
        bytes_sent: Bytes that one replica sent in the last step, `float32[]`.
        bytes_dense: Bytes that a dense all-reduce of the gradients, in their dtypes, would have
            sent, `float32[]`.
    """

    step: Count
    u: PyTree
    v: PyTree
    velocity: PyTree
    skipped: Count
    density: Scalar
    bytes_sent: Scalar
    bytes_dense: Scalar


def is_placeholder(node: Any) -> bool:
    """Whether a node stands in the place of a leaf: `None`, or a masked-out leaf."""
    return node is None or isinstance(node, optax.MaskedNode)


def initial_state(params: PyTree, min_size: int, axis: str | None) -> DGCState:
    """Return the state before the first step: zeros for each floating leaf.

    Args:
        params: The parameters of one replica.
        min_size: Entries from which on a floating leaf is compressed.
        axis: The replica axis, which need not be bound here.

    Returns:
        The state.

    Raises:
        TypeError: For a complex leaf, and for one that is no array.
    """

    def is_compressed(leaf: Leaf) -> bool:
        return is_floating(leaf) and jnp.size(leaf) >= max(min_size, 1)

    def row(leaf: Leaf) -> Array | optax.MaskedNode:
        if not is_compressed(leaf):
            return optax.MaskedNode()
        return as_local(jnp.zeros((1, jnp.size(leaf)), jnp.float32), axis)

    def shaped(leaf: Leaf) -> Array | optax.MaskedNode:
        if is_compressed(leaf) or not is_floating(leaf):
            return optax.MaskedNode()
        return jnp.zeros(jnp.shape(leaf), jnp.float32)

    return DGCState(
        step=jnp.zeros((), jnp.int32),
        u=jax.tree.map(row, params),
        v=jax.tree.map(row, params),
        velocity=jax.tree.map(shaped, params),
        skipped=jnp.zeros((), jnp.int32),
        density=jnp.zeros((), jnp.float32),
        bytes_sent=jnp.zeros((), jnp.float32),
        bytes_dense=jnp.zeros((), jnp.float32),
    )


def is_floating(leaf: Any) -> bool:
    """Whether a leaf has momentum: real floating arrays do."""
    if not (is_number(leaf) or is_traced(leaf)):
        raise TypeError(
            f"jrc.scale_by_dgc: parameters must be arrays, got {type(leaf).__name__} {leaf!r}. "
            "Take other values out of the tree."
        )
    dtype = jnp.result_type(leaf)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"jrc.scale_by_dgc: parameters must be real, got {dtype} of shape {jnp.shape(leaf)}. "
            "Make the real and the imaginary part two leaves."
        )
    return jnp.issubdtype(dtype, jnp.floating)


def dgc_specs(state: PyTree, axis_name: AxisName) -> PyTree:
    """Return the `PartitionSpec`s of a state, for `in_specs` and `out_specs` of `jax.shard_map`.

    `P(axis_name)` for what differs between replicas: u and v of every `DGCState`, and the
    gradients that an `optax.MultiSteps` around one accumulates. `P()` for all else.

    Args:
        state: Any tree with `DGCState`s in it: an optimizer's state, a whole train state, or the
            shapes of one.
        axis_name: The replica axis, or the pair `(inner, outer)` of which states differ along the
            outer one.

    Returns:
        The same tree with a `PartitionSpec` in each leaf's place.

    Raises:
        ValueError: If `axis_name` is neither a name nor a pair of two.

    Example:
        >>> from jrc.dgc import dgc_momentum
        >>> state = dgc_momentum(0.1, 0.9, 0, min_size=2).init({"w": jnp.ones((3, 4))})
        >>> specs = dgc_specs(state, "data")
        >>> specs[0].u["w"] == PartitionSpec("data"), specs[0].step == PartitionSpec()
        (True, True)
    """
    own = replica_axis(axis_name, "jrc.dgc_specs")

    def specs_of(node: Any) -> Any:
        if not _has_local_fields(node):
            return PartitionSpec()
        parts = {
            name: _local_specs(part, own) if name in _LOCAL_FIELDS else dgc_specs(part, axis_name)
            for name, part in node._asdict().items()
        }
        return type(node)(**parts)

    return jax.tree.map(specs_of, state, is_leaf=_has_local_fields)


def dgc_states(tree: PyTree) -> list[DGCState]:
    """Return every `DGCState` in a tree, in the tree's order."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, DGCState))
    return [leaf for leaf in leaves if isinstance(leaf, DGCState)]


_LOCAL_FIELDS = ("u", "v", "acc_grads")
"""Fields of a `DGCState`, and of an `optax.MultiStepsState`, that differ between replicas."""


def _has_local_fields(node: Any) -> bool:
    """Whether a node is a `DGCState`, or the state of `MultiSteps` around one."""
    if isinstance(node, optax.MultiStepsState):
        return bool(dgc_states(node.inner_opt_state))
    return isinstance(node, DGCState)


def _local_specs(tree: PyTree, axis_name: str) -> PyTree:
    """Return specs that split arrays along their first axis; a scalar is not split."""
    local = PartitionSpec(axis_name)
    return jax.tree.map(lambda leaf: local if jnp.ndim(leaf) else PartitionSpec(), tree)
