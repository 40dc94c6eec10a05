"""Every compression must exchange over the axes of the step, or replicas would differ."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, PartitionSpec

from jrc._errors import listed
from jrc._layout import Layout
from jrc._tree import named_leaves
from jrc._typing import PyTree, Transform
from jrc.dgc._internal import dgc_states, served
from jrc.train._optax import differentiated, update

# States of wrappers that decide by the gradients of their own replica, equally on all of them.
_GUARDS = (optax.MultiStepsState, optax.ApplyIfFiniteState)


def check_compression_axis(
    tx: Transform, params: PyTree, opt_state: PyTree, layout: Layout
) -> None:
    """Raise if a compression in `tx` exchanges over no axis or another one than the step's.

    Args:
        tx: A transform with at least one compression.
        params: Parameters or their shapes.
        opt_state: The state of `tx`, or its shapes.
        layout: The layout of the step.

    Raises:
        ValueError: If an axis is wrong, or a transform before a compression or around it mixes
            local gradients with averaged ones.
    """
    axis = layout.replicas if layout.means is None else (layout.means, layout.replicas)
    found = [state.axis.name for state in dgc_states(opt_state)]
    if not any(found):
        raise ValueError(
            f"tx must exchange over the axis {axis!r} of the step with its "
            f"{layout.rows} replicas, got a compression with axis_name=None, "
            f"which is one replica. Pass axis_name={axis!r} to it."
        )
    for name in found:
        if name != axis:
            names = name[::-1] if isinstance(name, tuple) else (name or "",)
            known = [x for x in names if x in layout.mesh.axis_names]
            raise ValueError(
                f"every compression in tx must have the axis_name={axis!r} of the step, got "
                f"one that exchanges over {listed(known, 'no axis of the mesh')}, so that the "
                f"parameters of the replicas would differ. Pass axis_name={axis!r} to it."
            )
    _check_mixing(tx, params, opt_state, layout)


def _check_mixing(tx: Transform, params: PyTree, opt_state: PyTree, layout: Layout) -> None:
    """Raise if an update differs between replicas, as a norm of local and mean gradients does.

    The update is traced once: types of its results have the axes along which they vary.
    """
    local = served(differentiated(params), dgc_states(opt_state))
    is_guard = lambda node: isinstance(node, _GUARDS)  # noqa: E731
    if any(map(is_guard, jax.tree.leaves(opt_state, is_leaf=is_guard))):
        return
    names, differing = layout.names, []

    def updates(params: PyTree) -> None:
        vary = lambda p, own: jax.lax.pcast(p, names, to="varying") if own else p  # noqa: E731
        grads = jax.tree.map(vary, differentiated(params), local)
        new, _ = update(tx, grads, tx.init(params), params, {"value": jnp.float32(0)})
        differing.extend(name for name, x in named_leaves(new) if jax.typeof(x).mat.varying)

    bound, whole = AbstractMesh(tuple(layout.mesh.shape[x] for x in names), names), PartitionSpec()
    specs: Any = {"in_specs": whole, "out_specs": whole}
    try:
        jax.eval_shape(jax.shard_map(updates, mesh=bound, **specs), params)
    except (TypeError, ValueError, NotImplementedError):
        return  # what JAX cannot type with replication types is not judged
    if differing:
        raise ValueError(
            "tx must give every replica the same update, got different ones of "
            f"{listed(differing[:3])}: something before the compression or around it mixes local "
            "gradients with those that are averaged, as a norm of all leaves does. Leave it out, "
            "or put it inside of the mask: optax.masked(optax.chain(clip, compression), mask)."
        )
