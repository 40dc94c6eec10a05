"""One update, in call order: flatten, check, local gradients, compressed leaves, the others, state.

`update` returns the direction as an array for each parameter; `apply` adds it to the parameters.
Both take the same way.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jrc._tree import sum_dtype
from jrc._typing import Array, PyTree, Real
from jrc._validate import scalar
from jrc.dgc._collectives import (
    all_finite,
    as_local,
    dense_mean,
    is_already_reduced,
    num_replicas,
    ring_all_reduce_bytes,
)
from jrc.dgc._compressed import Work, run_phase
from jrc.dgc._config import DGCConfig
from jrc.dgc._leaves import Leaves, flatten, pick, put, updates_of
from jrc.dgc._local_gradient import local_gradients
from jrc.dgc._momentum import momentum_step
from jrc.dgc._phases import entry_at, phase_at, plan_phases
from jrc.dgc._state import DGCState, is_placeholder


def update(
    gradients: PyTree, state: DGCState, params: PyTree | None, config: DGCConfig
) -> tuple[PyTree, DGCState]:
    """Return updates that are equal on every replica, and the new state.

    Args:
        gradients: This replica's.
        state: From `init` or the step before.
        params: The parameters, if known.
        config: The arguments of `scale_by_dgc`.

    Returns:
        Updates like the gradients, in the parameters' dtypes, and the new state.
    """
    leaves = flatten(gradients, state, params, "update")
    direction, state = _step(leaves, [None] * len(leaves.compressed), 1.0, config)
    return updates_of(leaves, direction.compressed, direction.dense), state


def apply(
    gradients: PyTree, state: DGCState, params: PyTree, scale: Array | Real, config: DGCConfig
) -> tuple[PyTree, DGCState]:
    """Return the parameters with the scaled direction added, and the new state.

    Only entries that were sent are touched.

    Args:
        gradients: This replica's.
        state: From `init` or the step before.
        params: The parameters.
        scale: What the direction is multiplied by, `float32[]`.
        config: The arguments of `scale_by_dgc`.

    Returns:
        Parameters and state.
    """
    leaves = flatten(gradients, state, params, "apply")
    remedy = "Pass -0.1 to descend with a learning rate of 0.1."
    scalar(scale, "scale", "jrc.scale_by_dgc", remedy=remedy)
    old = [x if is_placeholder(x) else jnp.asarray(x) for x in leaves.params or ()]
    flat = [x.reshape(-1) for x in pick(old, leaves.compressed)]
    # Sums of several replicas' entries are not rounded one by one to half precision.
    targets = [x if x.dtype == jnp.float32 else None for x in flat]
    direction, state = _step(leaves, targets, scale, config)
    compressed = [
        (_added(x, landed) if target is None else landed).reshape(param.shape)
        for x, target, landed, param in zip(
            flat, targets, direction.compressed, pick(old, leaves.compressed), strict=True
        )
    ]
    pairs = zip(pick(old, leaves.dense), direction.dense, strict=True)
    dense = [_added(x, scale * change) for x, change in pairs]
    return leaves.tree(put(old, leaves.compressed, compressed), leaves.dense, dense), state


class Direction(NamedTuple):
    """What a step moves by, leaf by leaf.

    Attributes:
        compressed: The targets with the scaled direction added, float32, flat.
        dense: The direction of the leaves on the dense path, float32, not scaled.
    """

    compressed: list[Array]
    dense: list[Array]


def _step(
    leaves: Leaves, targets: Sequence[Array | None], scale: Array | Real, config: DGCConfig
) -> tuple[Direction, DGCState]:
    """Return what the step moves by and the new state."""
    replicas = _checked_replicas(config)
    floating = pick(leaves.gradients, leaves.floating)
    _check_local(floating, config)
    sizes = [gradient.size for gradient in pick(leaves.gradients, leaves.compressed)]
    rest = sum(gradient.size for gradient in pick(leaves.gradients, leaves.dense))
    phases = plan_phases(sizes, rest, replicas, config)
    now = phase_at(leaves.state.step, phases)

    local = local_gradients(leaves, replicas, config)
    # Known before anything changes. Where it is false every new value is the old one.
    ok = all_finite(pick(local, leaves.floating), config.axis)
    work = Work(
        gradients=[gradient.reshape(1, -1) for gradient in pick(local, leaves.compressed)],
        u=[as_local(u, config.axis) for u in pick(leaves.u, leaves.compressed)],
        v=[as_local(v, config.axis) for v in pick(leaves.v, leaves.compressed)],
        targets=targets,
        scale=jnp.asarray(scale, jnp.float32),
        counts=entry_at([_int32(phase.counts) for phase in phases], now, jnp.int32),
        ok=ok,
    )
    outcome = run_phase(work, phases, now, replicas, config)
    directions, velocity = _dense_path(leaves, local, ok, config)
    dense_bytes = sum(gradient.size * gradient.dtype.itemsize for gradient in floating)
    state = DGCState(
        step=jnp.where(ok, optax.safe_increment(leaves.state.step), leaves.state.step),
        u=leaves.tree(leaves.u, leaves.compressed, outcome.u),
        v=leaves.tree(leaves.v, leaves.compressed, outcome.v),
        velocity=leaves.tree(leaves.velocity, leaves.dense, velocity),
        skipped=jnp.where(ok, leaves.state.skipped, optax.safe_increment(leaves.state.skipped)),
        density=entry_at([phase.density for phase in phases], now),
        bytes_sent=entry_at([phase.bytes_sent for phase in phases], now),
        bytes_dense=jnp.float32(ring_all_reduce_bytes(dense_bytes, replicas, itemsize=1)),
    )
    return Direction(outcome.targets, directions), state


def _dense_path(
    leaves: Leaves, local: list[Any], ok: Array, config: DGCConfig
) -> tuple[list[Array], list[Array]]:
    """Return directions and velocities of the leaves that are too small to compress."""
    means = dense_mean(pick(local, leaves.dense), config.axis)
    velocities = pick(leaves.velocity, leaves.dense)
    steps = [
        momentum_step(velocity, mean, config.decay)
        for velocity, mean in zip(velocities, means, strict=True)
    ]
    directions = [jnp.where(ok, direction, 0.0) for _, direction in steps]
    new = [jnp.where(ok, new, old) for (new, _), old in zip(steps, velocities, strict=True)]
    return directions, new


def _added(x: Array, change: Array) -> Array:
    """Return the sum in the dtype of `x`; 8-bit floats saturate at their largest number."""
    new = x.astype(sum_dtype(x.dtype)) + change
    if x.dtype.itemsize == 1:
        limits = jnp.finfo(x.dtype)
        new = jnp.clip(new, float(limits.min), float(limits.max))
    return new.astype(x.dtype)


def _int32(counts: Sequence[int]) -> list[int]:
    """Return counts that fit into int32; only a dense sum takes leaves with more entries."""
    return [min(count, 2**31 - 1) for count in counts]


def _checked_replicas(config: DGCConfig) -> int:
    """Return the axis size after checking it against `num_trainers`."""
    num_replicas(config.inner_axis)
    replicas = num_replicas(config.axis)
    if config.num_trainers not in (None, replicas):
        raise ValueError(
            f"jrc.scale_by_dgc: num_trainers must be the size of axis {config.axis!r}, which is "
            f"{replicas}, got {config.num_trainers}. Leave num_trainers out to take that size."
        )
    return replicas


def _check_local(gradients: list[jax.Array], config: DGCConfig) -> None:
    """Raise if gradients were summed over an axis before."""
    for axis in (config.axis, config.inner_axis):
        if any(is_already_reduced(gradient, axis) for gradient in gradients):
            raise ValueError(
                "jrc.scale_by_dgc: gradients must be local to each replica, got ones that are "
                f"equal along axis {axis!r}: jax.grad with respect to replicated parameters sums "
                "them, and compression would save nothing. "
                f'Call jax.lax.pcast(params, {axis!r}, to="varying") before jax.grad.'
            )
