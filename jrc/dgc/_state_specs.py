"""How the states of the transforms are laid out over the replicas, and inside of each."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jrc._errors import public
from jrc._layout import check_whole
from jrc._mesh_axes import AxisName, replica_axis
from jrc._specs import Mirror, axes_of, mirrored, trimmed
from jrc._typing import PyTree
from jrc.dgc._state import DGCState, dgc_states


@public("jrc.dgc_specs")
def dgc_specs(state: PyTree, axis_name: AxisName, param_specs: PyTree = None) -> PyTree:
    """Return the `PartitionSpec`s of a state, for `in_specs` and `out_specs` of `jax.shard_map`.

    `P(axis_name)` for what differs between replicas: u and v of every `DGCState`, and the
    gradients that an `optax.MultiSteps` around one accumulates. `P()` for all else.

    With `param_specs` the replicas themselves are split, over other axes of the mesh: u and v are
    `P(axis_name, *spec)`, and parameters and every array of their shape, as those of the
    transforms behind the compression, are `spec`.

    Args:
        state: Any tree with `DGCState`s in it: an optimizer's state, a whole train state, or the
            shapes of one.
        axis_name: The replica axis, or the pair `(inner, outer)` of which states differ along the
            outer one.
        param_specs: A `PartitionSpec` for each parameter, in their tree, or one for all. Leave it
            out in a `jax.shard_map` that is manual over the replica axis alone.

    Returns:
        The same tree with a `PartitionSpec` in each leaf's place.

    Raises:
        ValueError: If `axis_name` is neither a name nor a pair of two, or if a parameter is split
            over the replica axis.

    Example:
        >>> from jrc.dgc import dgc_momentum
        >>> state = dgc_momentum(0.1, 0.9, 0, min_size=2).init({"w": jnp.ones((3, 4))})
        >>> specs = dgc_specs(state, "data")
        >>> specs[0].u["w"] == PartitionSpec("data"), specs[0].step == PartitionSpec()
        (True, True)
        >>> specs = dgc_specs(state, "data", {"w": PartitionSpec("model")})
        >>> specs[0].u["w"] == PartitionSpec("data", "model")
        True
    """
    own = replica_axis(axis_name)
    if param_specs is not None:
        check_whole(param_specs, (own,), "params", f"of the compressed axis {own!r}")
    return state_specs(state, own, None, param_specs)


def state_specs(state: PyTree, axis: str, params: PyTree, specs: PyTree) -> PyTree:
    """Return the specs of a state of parameters that are split themselves.

    Args:
        state: Any tree, with or without `DGCState`s.
        axis: The replica axis.
        params: The parameters, so that arrays of another shape are told apart; `None` if their
            shapes are not known.
        specs: A `PartitionSpec` for each parameter, or one for all; `None` if they are whole.

    Returns:
        The same tree with a `PartitionSpec` in each leaf's place.
    """
    treedef = jax.tree.structure(state)
    layouts = treedef.flatten_up_to(_layouts(state))
    # Joined arrays have another shape than the parameter that they surely belong to.
    both = zip(mirrored(state, params, specs), mirrored(state, None, specs), strict=True)
    found = [
        _spec(layout, by_name if layout == "joined" else by_shape, axis)
        for layout, (by_shape, by_name) in zip(layouts, both, strict=True)
    ]
    return treedef.unflatten(found)


_LAYOUTS = {"u": "rows", "v": "rows", "acc_grads": "joined"}
"""Fields of a `DGCState`, and of an `optax.MultiStepsState`, that differ between replicas.

`"rows"`: a row for each replica; `"joined"`: the replicas' arrays one after another.
"""


def _layouts(state: PyTree) -> PyTree:
    """Return for each leaf how the arrays of the replicas are joined, `"shared"` if they are equal.

    A scalar is always shared.
    """

    def layouts_of(node: Any) -> Any:
        if not _has_local_fields(node):
            return "shared"
        parts = {name: local(name, part) for name, part in node._asdict().items()}
        return type(node)(**parts)

    def local(name: str, part: PyTree) -> PyTree:
        if name not in _LAYOUTS:
            return _layouts(part)
        return jax.tree.map(lambda leaf: _LAYOUTS[name] if jnp.ndim(leaf) else "shared", part)

    return jax.tree.map(layouts_of, state, is_leaf=_has_local_fields)


def _has_local_fields(node: Any) -> bool:
    """Whether a node is a `DGCState`, or the state of `MultiSteps` around one."""
    if isinstance(node, optax.MultiStepsState):
        return bool(dgc_states(node.inner_opt_state))
    return isinstance(node, DGCState)


def _spec(layout: str, mirror: Mirror, axis: str) -> PartitionSpec:
    """Return the spec of a leaf, from the layout of its replicas and the spec of its parameter."""
    spec = mirror.spec or PartitionSpec()
    if layout == "rows":
        return trimmed(PartitionSpec(axis, *spec))
    if layout == "joined":
        first = axes_of(PartitionSpec(*spec[:1]))
        return trimmed(PartitionSpec((axis, *first) if first else axis, *spec[1:]))
    return trimmed(PartitionSpec(None, *spec) if mirror.rows else spec)
