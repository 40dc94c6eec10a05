"""Checks that replicas stay equal: every compression exchanges over the axes of the step."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jrc._errors import listed
from jrc._tree import named_leaves
from jrc._typing import PyTree, Transform
from jrc.dgc import DGCState
from jrc.dgc._internal import AxisName, dgc_states, served
from jrc.train._optax import differentiated, update

# States of wrappers that decide by the gradients of their own replica, equally on all of them.
_GUARDS = (optax.MultiStepsState, optax.ApplyIfFiniteState)


def check_axis(tx: Transform, params: PyTree, axis: AxisName, mesh: Mesh) -> None:
    """Raise if a compression in `tx` exchanges over no axis or another one than the step's.

    Args:
        tx: A transform that holds at least one compression.
        params: Parameters or their shapes.
        axis: The axis, or the pair `(inner, outer)`, of the step.
        mesh: The mesh of the step.

    Raises:
        ValueError: If an axis is wrong, or a transform before a compression mixes local gradients
            with averaged ones.
    """
    compressions = dgc_states(jax.eval_shape(tx.init, params))
    found = [state.axis.name for state in compressions]
    if not any(found):
        raise ValueError(
            f"tx must exchange over the axis {axis!r} of the step with its "
            f"{mesh.shape[_names_of(axis)[0]]} replicas, got a compression with axis_name=None, "
            f"which is one replica. Pass axis_name={axis!r} to it."
        )
    for name in found:
        if name == axis:
            continue
        known = [] if name is None else [x for x in _names_of(name) if x in mesh.axis_names]
        raise ValueError(
            f"every compression in tx must have the axis_name={axis!r} of the step, got "
            f"one that exchanges over {listed(known, 'no axis of the mesh')}, so that the "
            f"parameters of the replicas would differ. Pass axis_name={axis!r} to it."
        )
    _check_mixing(tx, params, compressions, _names_of(axis), mesh)


def _check_mixing(
    tx: Transform,
    params: PyTree,
    compressions: list[DGCState],
    names: tuple[str, ...],
    mesh: Mesh,
) -> None:
    """Raise if an update differs between replicas, as a norm of local and mean gradients does."""
    local = served(differentiated(params), compressions)
    if all(jax.tree.leaves(local)):
        return

    def updates(params: PyTree) -> None:
        state = tx.init(params)
        nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, _GUARDS))
        if any(isinstance(node, _GUARDS) for node in nodes):
            return
        grads = jax.tree.map(
            lambda p, is_local: jax.lax.pcast(p, names, to="varying") if is_local else p,
            differentiated(params),
            local,
        )
        new, _ = update(tx, grads, state, params, {"value": jnp.float32(0)})
        differing.extend(name for name, x in named_leaves(new) if jax.typeof(x).mat.varying)

    differing: list[str] = []
    bound = AbstractMesh(tuple(mesh.shape[name] for name in names), names)
    whole: Any = PartitionSpec()
    try:
        jax.eval_shape(jax.shard_map(updates, mesh=bound, in_specs=whole, out_specs=whole), params)
    except (TypeError, ValueError, NotImplementedError):
        return  # what JAX cannot type with replication types is not judged
    if differing:
        raise ValueError(
            "tx must give every replica the same update, got different ones of "
            f"{listed(differing[:3])}: something before the compression mixes local gradients with "
            "those that are averaged, as a norm of all leaves does. Put it inside of the mask: "
            "optax.masked(optax.chain(clip, compression), mask)."
        )


def _names_of(axis: AxisName) -> tuple[str, ...]:
    """Return the axes of a step, that of the replicas first."""
    return (axis,) if isinstance(axis, str) else axis[::-1]
