"""The state of the transform, and how it is laid out over the replicas."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jrc._tree import is_number, is_traced
from jrc._typing import Array, Count, Leaf, PyTree, Scalar
from jrc.dgc import _collectives


class DGCState(NamedTuple):
    """State of `scale_by_dgc`.

    Each replica has its own `u` and `v`; all else is the same on every replica. A leaf that a
    field does not serve has an `optax.MaskedNode()` there.

    Attributes:
        step: DGC steps taken, `int32[]`.
        u: Local velocity of each compressed leaf, `float32[1, n]`: a row for each replica, of which
            one replica sees its own.
        v: Accumulated, unsent gradient of each compressed leaf, `float32[1, n]` likewise.
        velocity: Momentum of each leaf on the dense path, float32 in the leaf's shape.
        skipped: Steps skipped for a gradient that was not finite, `int32[]`.
        density: Share of the compressed leaves' entries that the last step sent, `float32[]`.
        bytes_sent: Bytes that one replica sent in the last step, `float32[]`.
        bytes_dense: Bytes that a dense all-reduce would have sent, `float32[]`.
    """

    step: Count
    u: PyTree
    v: PyTree
    velocity: PyTree
    skipped: Count
    density: Scalar
    bytes_sent: Scalar
    bytes_dense: Scalar


def is_slot(node: Any) -> bool:
    """Whether a tree's node stands in a leaf's place: `None`, or a masked-out leaf."""
    return node is None or isinstance(node, optax.MaskedNode)


def initial_state(params: PyTree, min_size: int, axis: str | None) -> DGCState:
    """Zeros for each leaf, in the fields that serve it.

    Args:
        params: The parameters of one replica.
        min_size: Entries from which on a floating leaf is compressed.
        axis: The replica axis, which need not be bound here.

    Returns:
        The state before the first step.

    Raises:
        TypeError: For a complex leaf, and for one that is no array.
    """

    def is_compressed(leaf: Leaf) -> bool:
        return is_floating(leaf) and jnp.size(leaf) >= max(min_size, 1)

    def row(leaf: Leaf) -> Array | optax.MaskedNode:
        if not is_compressed(leaf):
            return optax.MaskedNode()
        return _collectives.as_local(jnp.zeros((1, jnp.size(leaf)), jnp.float32), axis)

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


def is_floating(leaf: Leaf) -> bool:
    """Whether a leaf has momentum at all."""
    if not (is_number(leaf) or is_traced(leaf)):
        raise TypeError(
            f"jrc.scale_by_dgc: parameters must be arrays, got {type(leaf).__name__} {leaf!r}; "
            "keep what is none apart from them"
        )
    dtype = jnp.result_type(leaf)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"jrc.scale_by_dgc: parameters must be real, got {dtype} of shape {jnp.shape(leaf)}; "
            "keep the real and the imaginary part as two leaves"
        )
    return jnp.issubdtype(dtype, jnp.floating)


def dgc_specs(state: PyTree, axis_name: _collectives.AxisName) -> PyTree:
    """The `PartitionSpec`s with which a state goes into and comes out of `jax.shard_map`.

    `P(axis_name)` for what each replica has of its own: u and v of every `DGCState`, and the
    gradients that an `optax.MultiSteps` around one gathers. `P()` for all else.

    Args:
        state: Any tree with `DGCState`s in it: an optimizer's state, a whole train state, or the
            shapes of one.
        axis_name: The replica axis; of a pair `(inner, outer)` the outer one, along which alone
            replicas differ.

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
    own = _collectives.replica_axis(axis_name, "jrc.dgc_specs")

    def specs_of(node: Any) -> Any:
        if not _holds_local_fields(node):
            return PartitionSpec()
        parts = {
            name: _local_specs(part, own) if name in _LOCAL_FIELDS else dgc_specs(part, axis_name)
            for name, part in node._asdict().items()
        }
        return type(node)(**parts)

    return jax.tree.map(specs_of, state, is_leaf=_holds_local_fields)


def dgc_states(tree: PyTree) -> list[DGCState]:
    """Every `DGCState` in a tree, in the tree's order."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, DGCState))
    return [leaf for leaf in leaves if isinstance(leaf, DGCState)]


_LOCAL_FIELDS = ("u", "v", "acc_grads")
"""Fields of a `DGCState`, and of an `optax.MultiStepsState`, that differ between replicas."""


def _holds_local_fields(node: Any) -> bool:
    """Whether a node has fields of both kinds: a `DGCState`, or `MultiSteps` around one."""
    if isinstance(node, optax.MultiStepsState):
        return bool(dgc_states(node.inner_opt_state))
    return isinstance(node, DGCState)


def _local_specs(tree: PyTree, axis_name: str) -> PyTree:
    """Specs of arrays that stand in line along their first axis; a scalar has none."""
    local = PartitionSpec(axis_name)
    return jax.tree.map(lambda leaf: local if jnp.ndim(leaf) else PartitionSpec(), tree)
