"""The states of the transforms, before the first step and wherever they stand in a tree."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Sharding

from jrc._mesh_axes import AxisName, axes_of_run
from jrc._specs import spec_of
from jrc._text import brief
from jrc._tree import is_number, is_traced, nodes_of
from jrc._typing import Array, Count, Leaf, PyTree, Scalar
from jrc.dgc._collectives import as_local


@jax.tree_util.register_static
class ReplicaAxis(NamedTuple):
    """The axis over which a transform exchanges, static: no leaf of a tree, but of its structure.

    A named tuple, so that `flax.serialization` writes and reads a state with it.

    Attributes:
        name: One axis name, a pair `(inner, outer)`, or `None` for one replica.
    """

    name: AxisName | None = None


class DGCState(NamedTuple):
    """State of `scale_by_dgc`.

    Each replica has its own `u` and `v`; all else is equal on every replica. A field has an
    `optax.MaskedNode()` in the place of each leaf that it has no array for.

    Attributes:
        step: DGC steps taken, `int32[]`.
        u: Local velocity of each compressed leaf, `float32[1, *shape]`: a row for each replica, in
            the leaf's shape and sharding; under `shard_map` a replica sees its own.
        v: Accumulated, unsent gradient of each compressed leaf, `float32[1, *shape]` likewise.
        velocity: Momentum of each leaf on the dense path, float32 in the leaf's shape.
        skipped: Steps skipped for a gradient that was not finite, `int32[]`.
        density: Share of the compressed leaves' entries that the last step sent, `float32[]`.
        bytes_sent: Bytes that one device sent in the last step, `float32[]`: those of its shards.
        bytes_dense: Bytes that a dense all-reduce of the gradients, in their dtypes, would have
            sent, `float32[]`.
        axis: The `axis_name` of the transform that `init` belongs to; static, no array.
    """

    step: Count
    u: PyTree
    v: PyTree
    velocity: PyTree
    skipped: Count
    density: Scalar
    bytes_sent: Scalar
    bytes_dense: Scalar
    axis: ReplicaAxis = ReplicaAxis()

    def __repr__(self) -> str:
        return brief(self)


class EF21State(DGCState):
    """State of `scale_by_ef21`, laid out, saved and resharded as a `DGCState`.

    The mean of u over the replicas is the velocity and the mean of v.

    Attributes:
        step: Steps taken, `int32[]`.
        u: Average M of the replica's own gradients, and of the mean ones of the steps that sent
            everything, of each compressed leaf, `float32[1, *shape]`: a row for each replica.
        v: M less what the replica has sent of it so far, `float32[1, *shape]` likewise.
        velocity: Estimate g of the mean of M, of every floating leaf, float32 in the leaf's shape,
            equal on every replica.
        skipped: Steps skipped for a gradient that was not finite, `int32[]`.
        density: Share of the compressed leaves' entries that the last step sent, `float32[]`.
        bytes_sent: Bytes that one device sent in the last step, `float32[]`.
        bytes_dense: Bytes that a dense all-reduce of the gradients would have sent, `float32[]`.
        axis: The `axis_name` of the transform; static, no array.
    """

    __slots__ = ()


def is_placeholder(node: Any) -> bool:
    """Whether a node stands in the place of a leaf: `None`, or a masked-out leaf."""
    return node is None or isinstance(node, optax.MaskedNode)


def initial_state(params: PyTree, min_size: int, axis_name: AxisName | None) -> DGCState:
    """Return the state before the first step: zeros for each floating leaf, split as it is.

    Args:
        params: The parameters of one replica.
        min_size: Entries from which on a floating leaf is compressed, those of its shard where
            `init` runs inside a `shard_map`.
        axis_name: The replica axis or the pair `(inner, outer)`, which need not be bound here.

    Returns:
        The state.

    Raises:
        TypeError: For a complex leaf, and for one that is no array.
    """
    own = () if axis_name is None else axes_of_run(axis_name)
    axis = own[0] if own else None

    def is_compressed(leaf: Leaf) -> bool:
        return is_floating(leaf) and jnp.size(leaf) >= max(min_size, 1)

    def row(leaf: Leaf) -> Array | optax.MaskedNode:
        if not is_compressed(leaf):
            return optax.MaskedNode()
        return as_local(_zeros_like(leaf, own)[None], axis)

    def shaped(leaf: Leaf) -> Array | optax.MaskedNode:
        if is_compressed(leaf) or not is_floating(leaf):
            return optax.MaskedNode()
        return _zeros_like(leaf, own)

    return DGCState(
        step=jnp.zeros((), jnp.int32),
        u=jax.tree.map(row, params),
        v=jax.tree.map(row, params),
        velocity=jax.tree.map(shaped, params),
        skipped=jnp.zeros((), jnp.int32),
        density=jnp.zeros((), jnp.float32),
        bytes_sent=jnp.zeros((), jnp.float32),
        bytes_dense=jnp.zeros((), jnp.float32),
        axis=ReplicaAxis(axis_name),
    )


def initial_estimates(params: PyTree, axis_name: AxisName | None) -> PyTree:
    """Return float32 zeros for each floating leaf, equal on every replica; others masked out."""
    own = () if axis_name is None else axes_of_run(axis_name)
    return jax.tree.map(
        lambda leaf: _zeros_like(leaf, own) if is_floating(leaf) else optax.MaskedNode(),
        params,
    )


def _zeros_like(leaf: Leaf, own: tuple[str, ...]) -> Array:
    """Return float32 zeros that are split, and vary between shards, as the leaf does."""
    sharding = None if isinstance(leaf, jax.ShapeDtypeStruct) else _split_of(leaf)
    zeros = jnp.zeros(jnp.shape(leaf), jnp.float32, device=sharding)
    if isinstance(leaf, jax.core.Tracer):
        for name in sorted(set(jax.typeof(leaf).mat.varying) - set(own)):
            zeros = as_local(zeros, name)
    return zeros


def _split_of(leaf: Leaf) -> Sharding | None:
    """Return how a leaf is split, `None` if it is whole."""
    spec = spec_of(leaf)
    if not spec:
        return None
    if isinstance(leaf, jax.core.Tracer):
        return jax.typeof(leaf).sharding
    return leaf.sharding if isinstance(leaf, jax.Array) else None


def is_floating(leaf: Any) -> bool:
    """Whether a leaf has momentum: real floating arrays do."""
    if not (is_number(leaf) or is_traced(leaf)):
        raise TypeError(
            f"parameters must be arrays, got {type(leaf).__name__} {leaf!r}. "
            "Take other values out of the tree."
        )
    dtype = jnp.result_type(leaf)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"parameters must be real, got {dtype} of shape {jnp.shape(leaf)}. "
            "Make the real and the imaginary part two leaves."
        )
    return jnp.issubdtype(dtype, jnp.floating)


def dgc_states(tree: PyTree) -> list[DGCState]:
    """Return every `DGCState` in a tree, in the tree's order."""
    return nodes_of(tree, DGCState)


def with_states(tree: PyTree, change: Callable[[DGCState], DGCState]) -> PyTree:
    """Return a tree with every `DGCState` in it changed, in the tree's order."""
    is_state = lambda node: isinstance(node, DGCState)  # noqa: E731
    changed = lambda node: change(node) if is_state(node) else node  # noqa: E731
    return jax.tree.map(changed, tree, is_leaf=is_state)


def without_axes(tree: PyTree) -> PyTree:
    """Return a tree whose `DGCState`s name no axis, to compare those of another axis with it."""
    return with_states(tree, lambda state: state._replace(axis=ReplicaAxis()))
