"""Checks of the arguments of `jrc.make_train_step`, and of those that other functions share."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jrc._errors import listed, name_of
from jrc._layout import Layout
from jrc._mesh_axes import AxisName
from jrc._tree import is_number, is_traced, named_leaves
from jrc._typing import PyTree
from jrc._validate import check_flag, one_of
from jrc.outer_optimizers import OuterOptimizer
from jrc.train._runners import VIAS


def check_order(loss_fn: Any, tx: Any) -> None:
    """Raise if the loss function and the transform are swapped."""
    if is_transform(loss_fn) and callable(tx) and not is_transform(tx):
        raise TypeError(
            f"loss_fn must come before tx, got a transform and `{name_of(tx)}`. Write "
            "jrc.make_train_step(loss_fn, tx)."
        )


def check_options(loss_fn: Any, via: Any, donate: Any) -> None:
    """Raise if an argument has a wrong type or value."""
    if not callable(loss_fn):
        raise TypeError(
            "loss_fn must be a function loss_fn(params, batch, key), got "
            f"{type(loss_fn).__name__}. Pass the function itself."
        )
    one_of(via, "via", VIAS)
    check_flag(donate, "donate")


def layout_of_step(mesh: Mesh | None, axis_name: AxisName, via: str) -> Layout:
    """Return the layout of the step, or raise if `via` cannot run on it."""
    one = via == "jit" and mesh is None
    layout = _on_one_device(axis_name) if one else Layout.of(mesh, axis_name)
    if via == "pmap" and layout.mesh.is_multi_process:
        raise ValueError(
            "mesh must be of one process with via='pmap', got devices of "
            f"{jax.process_count()}. Use via='shard_map'."
        )
    if via == "pmap" and (layout.mesh.size > layout.parts or layout.means is not None):
        raise ValueError(
            "mesh must have one axis with via='pmap', got "
            f"{listed(layout.mesh.axis_names)}. Use via='shard_map'."
        )
    return layout


def _on_one_device(axis_name: AxisName) -> Layout:
    """Return a layout on the first device; of one of several processes it would be a guess."""
    if jax.process_count() > 1:
        raise ValueError(
            f"mesh must be given with via='jit' in a run of {jax.process_count()} "
            "processes, got None. Use via='shard_map', or give each process a mesh of its own: "
            f"Mesh(jax.local_devices()[:1], ({axis_name!r},))."
        )
    names = axis_name[::-1] if isinstance(axis_name, tuple) else (axis_name,)
    device = np.asarray(jax.devices()[:1]).reshape([1] * len(names))
    known = all(isinstance(name, str) for name in names)
    return Layout.of(Mesh(device, names) if known else None, axis_name)


def is_transform(tx: Any) -> bool:
    """Return whether this is an optax transform, or has the methods of one."""
    return callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))


def check_transform(tx: Any) -> None:
    """Raise unless this is an optax transform."""
    if not is_transform(tx):
        raise TypeError(
            f"tx must be an optax transform, got {type(tx).__name__} {tx!r}. Write "
            "tx=optax.adam(0.01)."
        )


def check_arrays(tree: PyTree) -> None:
    """Raise unless all leaves are arrays."""
    for name, leaf in named_leaves(tree):
        if not (is_number(leaf) or is_traced(leaf)):
            raise TypeError(
                "every leaf of params and model_state must be an array, got "
                f"{type(leaf).__name__} {leaf!r} at {name!r}. Bind other values to the loss "
                "function."
            )


def check_outer(outer: Any) -> None:
    """Raise unless this is `None` or an outer optimizer."""
    if outer is None or (isinstance(outer, OuterOptimizer) and not isinstance(outer, type)):
        return
    raise TypeError(
        f"outer must be None or an outer optimizer, got {outer!r}. Write "
        "outer=jrc.SparseLoCo(sync_every=30)."
    )


def check_via(outer: OuterOptimizer | None, via: str, mesh: Mesh) -> None:
    """Raise for a `jit` over several devices, in which there are no replicas for `outer`."""
    if outer is not None and via == "jit" and mesh.size > 1:
        raise ValueError(
            "via must be 'shard_map' or 'pmap' with outer= on several devices, got 'jit' "
            f"on {mesh.size}. Leave via= out."
        )
