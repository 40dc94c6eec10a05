"""Checks of a mesh against state and batch: each axis splits something, and what it must."""

import math
import re
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jrc._errors import listed
from jrc._specs import axes_of
from jrc._tree import named_leaves
from jrc._typing import PyTree
from jrc.dgc._internal import dgc_states
from jrc.train._placement import batch_specs, own_specs, split_axes
from jrc.train._state import TrainState

_WHO = "jrc.make_train_step"


def check_split_batch(batch: PyTree, mesh: Mesh, names: tuple[str, ...], accumulate: int) -> None:
    """Raise unless the leading axis of every leaf splits over its devices and parts."""
    specs = jax.tree.leaves(batch_specs(batch, mesh, names, _WHO))
    for (name, leaf), spec in zip(named_leaves(batch), specs, strict=True):
        over = axes_of(PartitionSpec(*spec[:1]))
        parts = math.prod(mesh.shape[axis] for axis in over) * accumulate
        if np.shape(leaf)[0] % parts:
            raise ValueError(
                f"{_WHO}: the leading axis of every leaf of batch must be a multiple of the "
                f"devices that it is split over ({listed(over)}) * accumulate = {parts}, got shape "
                f"{list(np.shape(leaf))} at {name or '(the batch itself)'!r}. Drop the rest of "
                "the batch, or use fewer parts."
            )


def check_split_state(state: TrainState, mesh: Mesh, names: tuple[str, ...], via: str) -> None:
    """Raise if a state is split as this step cannot take it."""
    if via == "jit":
        if mesh.size > 1 and dgc_states(state.opt_state):
            raise ValueError(
                f"{_WHO}: tx must not compress with via='jit' on several devices, where XLA "
                f"reduces the gradients, got a compression and {mesh.size} devices. Use "
                "via='shard_map'."
            )
        return
    for what in ("params", "model_state"):
        tree = getattr(state, what)
        specs = jax.tree.leaves(own_specs(tree, mesh, _WHO, what))
        for (name, _), spec in zip(named_leaves(tree), specs, strict=True):
            if over := set(names) & set(axes_of(spec)):
                raise ValueError(
                    f"{_WHO}: {what} must be whole on every replica of axis_name with "
                    f"via={via!r}, got {name!r} split by {spec}. Use via='jit', where XLA gathers "
                    f"parameters and reduces gradients over {listed(sorted(over))}, or split them "
                    "over another mesh axis inside of each replica."
                )


def check_every_axis(
    call: Any, state: TrainState, batch: PyTree, mesh: Mesh, names: tuple[str, ...]
) -> None:
    """Raise if a mesh axis splits nothing: its devices would all do the same work.

    Args:
        call: The step before it is planned; lowered where state and batch name too few axes.
        state: The state.
        batch: The batch.
        mesh: The mesh.
        names: The axes of the step, which split the batch.

    Raises:
        ValueError: If neither state, batch nor the program of the loss function names an axis.
    """
    used = {*names, *split_axes(state, batch)}
    missing = [name for name in mesh.axis_names if mesh.shape[name] > 1 and name not in used]
    if not missing:
        return
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        text = call.lower(state, batch).as_text()
    text = re.sub(r"manual_axes=\{[^}]*\}|sdy\.mesh[^\n]*", "", text)
    missing = [name for name in missing if f'"{name}"' not in text]
    if missing:
        raise ValueError(
            f"{_WHO}: every axis of the mesh must split something, got {listed(missing)}, over "
            "which neither params, batch nor the loss function is split, so that its devices "
            "would repeat the same work. Split the batch over it, "
            f"PartitionSpec({(*names, *missing)!r}), or the parameters, or leave it out of the "
            "mesh."
        )
