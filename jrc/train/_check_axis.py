"""Whether replicas stay together: compressions over the step's axes, and one update for all."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jrc._errors import listed
from jrc._tree import named_leaves
from jrc._typing import PyTree
from jrc.dgc import AxisName, dgc_states, served
from jrc.train._state import names_of

_GUARDS = (optax.MultiStepsState, optax.ApplyIfFiniteState)
"""States of what decides by its own replica's gradients, and the same on all of them."""


def check_axis(
    tx: optax.GradientTransformation, params: PyTree, axis: AxisName, mesh: Mesh
) -> None:
    """A transform that exchanges over no axis, or over another one, would let replicas drift."""
    names = names_of(axis)

    def update(params: PyTree) -> PyTree:
        return tx.update(params, tx.init(params), params)[0]

    def over(bound: tuple[str, ...], fn: Any, check_vma: bool = False) -> Any:
        abstract = AbstractMesh(tuple(mesh.shape[name] for name in bound), bound)
        spec = PartitionSpec()
        return jax.shard_map(fn, mesh=abstract, in_specs=spec, out_specs=spec, check_vma=check_vma)

    try:
        jax.eval_shape(update, params)
    except Exception:  # without an axis it cannot exchange, as it should
        try:
            jax.eval_shape(over(names, update), params)
        except Exception as error:
            raise ValueError(
                f"jrc.make_train_step: tx cannot update over the axis {axis!r} of the step: "
                f"{error}. Pass axis_name={axis!r} to the compression."
            ) from error
        _check_each(tx, params, axis, over)
        _check_together(tx, params, axis, over)
        return
    raise ValueError(
        f"jrc.make_train_step: the step runs on {mesh.shape[names[0]]} replicas, and the "
        "compression in tx "
        f"has axis_name=None, which is one replica. Pass axis_name={axis!r} to it."
    )


def _check_each(
    tx: optax.GradientTransformation, params: PyTree, axis: AxisName, over: Callable[..., Any]
) -> None:
    """Every compression in a transform differs along the step's own axis, and no other."""
    names, along = names_of(axis), []

    def look(params: PyTree) -> None:
        for state in dgc_states(tx.init(params)):
            along.extend(jax.typeof(u).mat.varying for u in jax.tree.leaves(state.u))

    jax.eval_shape(over(names, look, check_vma=True), params)
    wrong = [sorted(found) for found in along if found != {names[0]}]
    if not wrong and len(names) > 1:
        try:  # without the inner axis, which it would have to average over
            jax.eval_shape(over(names[:1], lambda p: tx.update(p, tx.init(p), p)[0]), params)
        except Exception:
            return
        wrong = [list(names[:1])]
    if wrong:
        raise ValueError(
            f"jrc.make_train_step: every compression in tx has the axis_name={axis!r} of the step; "
            f"one exchanges over {listed(wrong[0]) or 'no axis'}, and replicas would drift apart. "
            f"Pass axis_name={axis!r} to it."
        )


def _check_together(
    tx: optax.GradientTransformation, params: PyTree, axis: AxisName, over: Callable[..., Any]
) -> None:
    """What is shared and what is local do not mix: a norm of both differs between replicas."""
    names, drifting = names_of(axis), []

    def look(params: PyTree) -> None:
        state = tx.init(params)
        guards = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, _GUARDS))
        own = served(params, dgc_states(state))
        if all(jax.tree.leaves(own)) or any(isinstance(node, _GUARDS) for node in guards):
            return
        grads = jax.tree.map(
            lambda p, own: jax.lax.pcast(p, names, to="varying") if own else p, params, own
        )
        updates, _ = tx.update(grads, state, params)
        drifting.extend(name for name, x in named_leaves(updates) if jax.typeof(x).mat.varying)

    try:
        jax.eval_shape(over(names, look, check_vma=True), params)
    except Exception:  # what JAX cannot follow is not judged
        return
    if drifting:
        raise ValueError(
            "jrc.make_train_step: tx gives every replica the same update; of "
            f"{listed(drifting[:3])} it differs, because something before the compression mixes "
            "local gradients with those that are averaged, as a norm of all leaves does. Put it "
            "inside of the mask: optax.masked(optax.chain(clip, compression), mask)."
        )
