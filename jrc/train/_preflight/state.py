"""The state must be one of this run: its kind, devices, leaves, rows, and how it is split."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrc._layout import Layout, check_whole, same_types
from jrc._rng import check_key
from jrc._tree import kind_of, named_leaves
from jrc.dgc._internal import dgc_states
from jrc.train._arguments import check_arrays
from jrc.train._state import TrainState
from jrc.train._synchronisation import Synchronisation


def check_form(state: Any) -> None:
    """Raise unless this is a `TrainState` whose arrays were not donated."""
    if not isinstance(state, TrainState):
        raise TypeError(
            f"state must be a TrainState of jrc.init_state, got {type(state).__name__}. "
            "Write state = jrc.init_state(params, tx, key)."
        )
    if _is_placed(state.step) and state.step.is_deleted():
        raise ValueError(
            "state must not be donated, got one whose arrays an earlier step has "
            "deleted. Use the state that it returned, or pass donate=False."
        )


def check_devices(state: TrainState, mesh: Mesh) -> None:
    """Raise unless the state lies on the devices of the mesh."""
    step = state.step
    placed = _is_placed(step) and step.committed
    if placed and step.sharding.device_set != set(mesh.devices.flat):
        raise ValueError(
            f"state must lie on the {mesh.size} devices of the step, got one on "
            f"{len(step.sharding.device_set)}, not the same ones. Give jrc.init_state and "
            "jrc.make_train_step the same mesh."
        )
    shared = NamedSharding(mesh, PartitionSpec())
    if placed and mesh.size > 1 and not same_types(step.sharding, shared):
        raise ValueError(
            "state must lie on the mesh of the step, whose axis_types are "
            f"{mesh.axis_types}, got one on {step.sharding}. Give jrc.init_state and "
            "jrc.make_train_step the same mesh."
        )


def _is_placed(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)


def check_leaves(state: TrainState) -> None:
    """Raise unless parameters are floating arrays, and the key is one."""
    check_arrays({"params": state.params, "model_state": state.model_state})
    check_key(state.key)
    for name, leaf in named_leaves(state.params):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise ValueError(
                "every leaf of params must be floating, because it is differentiated, got "
                f"{kind_of(leaf)} at {name!r}. Keep it in the model state."
            )


def check_rows(
    way: Synchronisation, expected: TrainState, state: TrainState, layout: Layout
) -> str | None:
    """Raise unless what differs between replicas has a row for each of them.

    Returns:
        In words, which array of all others has another shape than expected; `None` if none has.
    """
    specs = jax.tree.leaves(way.row_specs(expected, layout).opt_state)
    what = "rows" if way.reports_rows else "compression"
    leaves = jax.tree.leaves(expected.opt_state), named_leaves(state.opt_state), specs
    for want, (name, got), spec in zip(*leaves, strict=True):
        if not spec and jnp.shape(got) != want.shape:
            return f"{name!r} is {kind_of(got)} and not of shape {list(want.shape)}"
        if spec and np.size(got) != want.size * layout.rows:
            if np.ndim(got) == 0:
                raise ValueError(
                    "what differs between replicas must have a row for each of them, got "
                    f"{kind_of(got)} at {name!r} and {layout.rows} replicas. Write "
                    f"jnp.full(({layout.rows},), value)."
                )
            if got.shape[:1] == (layout.rows,):
                raise ValueError(
                    "state must fit the split of replicas on this mesh, got rows of "
                    f"{list(got.shape[1:])} for {want.size} entries. Build it with jrc.init_state "
                    "on this mesh, or take it over by jrc.reshard(..., mesh=mesh, outer=outer)."
                )
            raise ValueError(
                f"state must be built for the {layout.rows} replicas of the step, got one "
                f"with {what} for {got.size / want.size:g}. Give jrc.init_state and "
                "jrc.make_train_step the same mesh; without one, via='jit' takes one device, and "
                "jrc.init_state all of them."
            )
    return None


def check_split(state: TrainState, layout: Layout, via: str) -> None:
    """Raise if a state is split as this step cannot take it."""
    if via == "jit":
        if layout.mesh.size > 1 and dgc_states(state.opt_state):
            raise ValueError(
                "tx must not compress with via='jit' on several devices, where XLA "
                f"reduces the gradients, got a compression and {layout.mesh.size} devices. Use "
                "via='shard_map'."
            )
        return
    for what in ("params", "model_state"):
        remedy = (
            "Use via='jit', where XLA gathers parameters and reduces gradients over {over}, or "
            "split them over another mesh axis inside of each replica."
        )
        rule = f"of axis_name with via={via!r}"
        specs = layout.specs(getattr(state, what), what)
        check_whole(specs, layout.names, what, rule, remedy)
