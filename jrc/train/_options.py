"""Checks of the arguments of `jrc.make_train_step`."""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jrc._errors import listed, name_of
from jrc._validate import check_flag, one_of
from jrc.dgc._internal import AxisName
from jrc.remat import Plan, check_offload, checked_budget, checked_compilations
from jrc.train._runners import RUNNERS, WHO
from jrc.train._state import check_axis_name, is_transform, mesh_or_all, names_of


def check_order(loss_fn: Any, tx: Any) -> None:
    """Raise if the loss function and the transform are swapped."""
    if is_transform(loss_fn) and callable(tx) and not is_transform(tx):
        raise TypeError(
            f"{WHO}: loss_fn must come before tx, got a transform and `{name_of(tx)}`. Write "
            "jrc.make_train_step(loss_fn, tx)."
        )


def check_options(
    loss_fn: Any,
    via: Any,
    donate: Any,
    plan: Any,
    budget: Any,
    respect_checkpoints: Any,
    offload: Any,
    compilations: Any,
) -> None:
    """Raise if an argument has a wrong type or value, or two do not go together."""
    if not callable(loss_fn):
        raise TypeError(
            f"{WHO}: loss_fn must be a function loss_fn(params, batch, key), got "
            f"{type(loss_fn).__name__}. Pass the function itself."
        )
    one_of(via, "via", RUNNERS, WHO)
    check_flag(donate, "donate", WHO)
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(
            f"{WHO}: plan must be a jrc.Plan, got {type(plan).__name__}. Read a stored one with "
            "jrc.Plan.from_json(text)."
        )
    if plan is not None and budget is not None:
        raise ValueError(
            f"{WHO}: plan and memory_budget must not both be given, got a plan and {budget!r}. "
            "Leave one of them out."
        )
    check_flag(respect_checkpoints, "respect_checkpoints", WHO)
    if respect_checkpoints and budget is None:
        raise ValueError(
            f"{WHO}: respect_checkpoints must go with memory_budget, got none. Pass "
            "memory_budget='16GiB', or a plan that was made with respect_checkpoints=True."
        )
    check_offload(offload, WHO)
    if offload is not False and budget is None:
        raise ValueError(
            f"{WHO}: offload must go with memory_budget, got none. Pass memory_budget='16GiB', or "
            "a plan that was made with offload=True."
        )
    checked_compilations(compilations, WHO)
    if compilations is not None and budget is None:
        raise ValueError(
            f"{WHO}: compilations must go with memory_budget, got none. Pass "
            "memory_budget='16GiB', or a plan that was made with compilations=5."
        )
    if budget is None:
        return
    checked_budget(budget, WHO)
    if via == "pmap":
        raise ValueError(
            f"{WHO}: memory_budget must be used with a single program, got via='pmap', which makes "
            "several. Use via='shard_map', or pass plan=jrc.plan(loss_fn, ...)."
        )


def mesh_of_step(mesh: Mesh | None, axis_name: AxisName, via: str) -> Mesh:
    """Return the mesh of the step, or raise if `via` cannot run on it."""
    if via == "jit" and mesh is None:
        mesh = _one_device(axis_name)
    mesh = mesh_or_all(mesh, axis_name, WHO)
    if via == "pmap" and mesh.is_multi_process:
        raise ValueError(
            f"{WHO}: mesh must be of one process with via='pmap', got devices of "
            f"{jax.process_count()}. Use via='shard_map'."
        )
    names = names_of(axis_name)
    if via == "pmap" and (mesh.size > math.prod(mesh.shape[n] for n in names) or len(names) > 1):
        raise ValueError(
            f"{WHO}: mesh must have one axis with via='pmap', got {listed(mesh.axis_names)}. Use "
            "via='shard_map'."
        )
    return mesh


def _one_device(axis_name: AxisName) -> Mesh:
    """Return a mesh of the first device; of one of several processes it would be a guess."""
    if jax.process_count() > 1:
        raise ValueError(
            f"{WHO}: mesh must be given with via='jit' in a run of {jax.process_count()} "
            "processes, got None. Use via='shard_map', or give each process a mesh of its own: "
            f"Mesh(jax.local_devices()[:1], ({axis_name!r},))."
        )
    check_axis_name(axis_name, WHO)
    names = names_of(axis_name)
    return Mesh(np.asarray(jax.devices()[:1]).reshape([1] * len(names)), names)
