"""One update, in call order: flatten, check, local gradients, the step of the shards, state.

`update` returns the direction as an array for each parameter; `apply` adds it to the parameters.
Both take the same way.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jrc._tree import added
from jrc._typing import Array, PyTree, Real
from jrc._validate import is_real, scalar
from jrc.dgc._collectives import (
    bound_axes,
    is_already_reduced,
    num_replicas,
    ring_all_reduce_bytes,
)
from jrc.dgc._config import DGCConfig
from jrc.dgc._exchanges import Sharded
from jrc.dgc._leaves import Leaves, flatten, pick, put, updates_of
from jrc.dgc._local_gradient import local_gradients
from jrc.dgc._local_step import After, Before, after_specs, before_of, before_specs, local_step
from jrc.dgc._shards import Shards, check_known, on_shards, shards_of
from jrc.dgc._state import DGCState, is_placeholder


def update(
    gradients: PyTree,
    state: DGCState,
    params: PyTree | None,
    config: DGCConfig,
    param_specs: PyTree = None,
) -> tuple[PyTree, DGCState]:
    """Return updates that are equal on every replica, and the new state.

    Args:
        gradients: This replica's.
        state: From `init` or the step before.
        params: The parameters, if known.
        config: The arguments of `scale_by_dgc`.
        param_specs: How parameters are split; `None` takes that of the config.

    Returns:
        Updates like the gradients, in the parameters' dtypes, and the new state.
    """
    leaves = flatten(gradients, state, params, "update")
    targets: list[None] = [None] * len(leaves.compressed)
    direction, state = step(leaves, targets, 1.0, config, param_specs)
    return updates_of(leaves, direction.compressed, direction.dense), state


def apply(
    gradients: PyTree,
    state: DGCState,
    params: PyTree,
    scale: Array | Real,
    config: DGCConfig,
    param_specs: PyTree = None,
) -> tuple[PyTree, DGCState]:
    """Return the parameters with the scaled direction added, and the new state.

    Only entries that were sent are touched.

    Args:
        gradients: This replica's.
        state: From `init` or the step before.
        params: The parameters.
        scale: What the direction is multiplied by, `float32[]`.
        config: The arguments of `scale_by_dgc`.
        param_specs: How parameters are split; `None` takes that of the config.

    Returns:
        Parameters and state.
    """
    leaves = flatten(gradients, state, params, "apply")
    remedy = "Pass -0.1 to descend with a learning rate of 0.1."
    scalar(scale, "scale", "jrc.scale_by_dgc", remedy=remedy)
    old = [x if is_placeholder(x) else jnp.asarray(x) for x in leaves.params or ()]
    compressed = pick(old, leaves.compressed)
    # Sums of several replicas' entries are not rounded one by one to half precision.
    targets = [x if x.dtype == jnp.float32 else None for x in compressed]
    direction, state = step(leaves, targets, scale, config, param_specs)
    new = [
        added(x, landed) if target is None else landed
        for x, target, landed in zip(compressed, targets, direction.compressed, strict=True)
    ]
    pairs = zip(pick(old, leaves.dense), direction.dense, strict=True)
    dense = [added(x, scale * change) for x, change in pairs]
    return leaves.tree(put(old, leaves.compressed, new), leaves.dense, dense), state


class Direction(NamedTuple):
    """What a step moves by, leaf by leaf.

    Attributes:
        compressed: The targets with the scaled direction added, float32.
        dense: The direction of the leaves on the dense path, float32, not scaled.
    """

    compressed: list[Array]
    dense: list[Array]


def step(
    leaves: Leaves,
    targets: Sequence[Array | None],
    scale: Array | Real,
    config: DGCConfig,
    param_specs: PyTree,
    factor: Array | Real = 1.0,
) -> tuple[Direction, DGCState]:
    """Return what the step moves by and the new state.

    Args:
        leaves: The leaves of the step.
        targets: What the direction of each compressed leaf is added to, `None` for zeros.
        scale: What the direction is multiplied by.
        config: The arguments of the transform.
        param_specs: How parameters are split; `None` takes that of the config.
        factor: What local gradients are multiplied by.

    Returns:
        The direction, and the state.
    """
    replicas = _checked_replicas(config)
    floating = pick(leaves.gradients, leaves.floating)
    _check_local(floating, config)
    shards = shards_of(leaves, config.param_specs if param_specs is None else param_specs, config)
    _check_choice(shards, config)
    manual = bound_axes(config.axis)
    axes = [each & set(manual) for each in shards.axes]
    local = local_gradients(leaves, axes, replicas, config)
    if not (is_real(factor) and factor == 1):
        scaled = [gradient * factor for gradient in pick(local, leaves.floating)]
        local = put(local, leaves.floating, scaled)
    before = before_of(leaves, local, targets, shards, scale)
    kinds = pick(shards.axes, leaves.compressed)

    def run(before: Before) -> After:
        return local_step(before, kinds, replicas, config)

    specs = shards.specs_of(leaves)
    after = on_shards(run, shards, (before_specs(*specs),), after_specs(*specs), config.axis)(
        before
    )
    ok = after.ok
    # Shards have equal sizes, so that one device's share is known without asking the mesh.
    dense_bytes = sum(
        gradient.size * gradient.dtype.itemsize / shards.parts(place)
        for place, gradient in zip(leaves.floating, floating, strict=True)
    )
    state = leaves.state._replace(
        step=jnp.where(ok, optax.safe_increment(leaves.state.step), leaves.state.step),
        u=leaves.tree(leaves.u, leaves.compressed, after.u),
        v=leaves.tree(leaves.v, leaves.compressed, after.v),
        velocity=leaves.tree(leaves.velocity, leaves.dense, after.velocity),
        skipped=jnp.where(ok, leaves.state.skipped, optax.safe_increment(leaves.state.skipped)),
        density=after.density,
        bytes_sent=after.bytes_sent,
        bytes_dense=jnp.float32(ring_all_reduce_bytes(dense_bytes, replicas, itemsize=1)),
    )
    return Direction(after.targets, after.directions), state


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


def _check_choice(shards: Shards, config: DGCConfig) -> None:
    """Raise if leaves that are equal on several devices might be sent differently by them."""
    if config.local_grad_clip_norm is not None:
        check_known(shards, "local_grad_clip_norm")
    if not getattr(config.selector, "by_leaf", True):
        check_known(shards, f"selector={config.selector!r}")
    if isinstance(config.exchange, Sharded):
        check_known(shards, "exchange='sharded'")


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
