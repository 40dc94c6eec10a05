"""Checks that replicas stay equal: every compression exchanges over the axes of the step."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jrc._errors import listed
from jrc._tree import named_leaves
from jrc._typing import PyTree, Transform
from jrc.dgc import AxisName, dgc_states, served
from jrc.train._optax import differentiated, update

_WHO = "jrc.make_train_step"

# States of wrappers that decide by the gradients of their own replica, equally on all of them.
_GUARDS = (optax.MultiStepsState, optax.ApplyIfFiniteState)


def check_axis(tx: Transform, params: PyTree, axis: AxisName, mesh: Mesh) -> None:
    """Raise if a compression in `tx` exchanges over no axis or another one than the step's.

    Nothing is run: `tx` is traced on shapes. An error that its update raises for another reason is
    the user's own and is not changed.

    Args:
        tx: A transform that holds at least one compression.
        params: Parameters or their shapes.
        axis: The axis, or the pair `(inner, outer)`, of the step.
        mesh: The mesh of the step.

    Raises:
        ValueError: If an axis is wrong, or a transform before a compression mixes local gradients
            with averaged ones.
    """
    names = (axis,) if isinstance(axis, str) else axis[::-1]

    def updates(params: PyTree) -> PyTree:
        return _updates(tx, differentiated(params), tx.init(params), params)

    def over(bound: tuple[str, ...], fn: Any, check_vma: bool = False) -> Any:
        abstract = AbstractMesh(tuple(mesh.shape[name] for name in bound), bound)
        spec = PartitionSpec()
        return jax.shard_map(fn, mesh=abstract, in_specs=spec, out_specs=spec, check_vma=check_vma)

    wrong = _wrong_axes(tx, params, names, over)
    if wrong is None:
        jax.eval_shape(over(names, updates), params)
    if _is_traceable(updates, params):
        raise ValueError(
            f"{_WHO}: tx must exchange over the axis {axis!r} of the step with its "
            f"{mesh.shape[names[0]]} replicas, got a compression with axis_name=None, which is one "
            f"replica. Pass axis_name={axis!r} to it."
        )
    if wrong is None and len(names) > 1 and _is_traceable(over(names[:1], updates), params):
        wrong = names[:1]  # it does not average over the inner axis
    if wrong is not None:
        raise ValueError(
            f"{_WHO}: every compression in tx must have the axis_name={axis!r} of the step, got "
            f"one that exchanges over {listed(wrong, 'no axis of the mesh')}, so that the "
            f"parameters of the replicas would differ. Pass axis_name={axis!r} to it."
        )
    _check_mixing(tx, params, names, over)


def _updates(tx: Transform, grads: PyTree, state: PyTree, params: PyTree) -> PyTree:
    return update(tx, grads, state, params, {"value": jnp.float32(0)})[0]


def _is_traceable(fn: Callable[..., Any], params: PyTree) -> bool:
    try:
        jax.eval_shape(fn, params)
    except Exception:  # an axis that is not bound raises different errors
        return False
    return True


def _wrong_axes(
    tx: Transform,
    params: PyTree,
    names: tuple[str, ...],
    over: Callable[..., Any],
) -> Sequence[str] | None:
    """Return the axes along which a compression's u differs, if they are not the step's."""
    found: list[set[str]] = []

    def init(params: PyTree) -> None:
        for state in dgc_states(tx.init(params)):
            found.extend(set(jax.typeof(u).mat.varying) for u in jax.tree.leaves(state.u))

    jax.eval_shape(over(names, init, check_vma=True), params)
    return next((sorted(axes) for axes in found if axes != {names[0]}), None)


def _check_mixing(
    tx: Transform,
    params: PyTree,
    names: tuple[str, ...],
    over: Callable[..., Any],
) -> None:
    """Raise if an update differs between replicas, as a norm of local and mean gradients does."""
    differing: list[str] = []

    def compare(params: PyTree) -> None:
        state = tx.init(params)
        guards = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, _GUARDS))
        grads = differentiated(params)
        local = served(grads, dgc_states(state))
        if all(jax.tree.leaves(local)) or any(isinstance(node, _GUARDS) for node in guards):
            return
        grads = jax.tree.map(
            lambda p, is_local: jax.lax.pcast(p, names, to="varying") if is_local else p,
            grads,
            local,
        )
        updates = _updates(tx, grads, state, params)
        differing.extend(name for name, x in named_leaves(updates) if jax.typeof(x).mat.varying)

    # What JAX cannot type with replication types is not judged.
    if _is_traceable(over(names, compare, check_vma=True), params) and differing:
        raise ValueError(
            f"{_WHO}: tx must give every replica the same update, got different ones of "
            f"{listed(differing[:3])}: something before the compression mixes local gradients with "
            "those that are averaged, as a norm of all leaves does. Put it inside of the mask: "
            "optax.masked(optax.chain(clip, compression), mask)."
        )
