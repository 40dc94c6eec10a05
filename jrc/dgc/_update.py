"""One step: the guard, the local gradients, the two paths, and the books."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jrc._tree import sum_dtype
from jrc._typing import Array, Leaf, PyTree
from jrc.dgc import _collectives
from jrc.dgc._compressed import Work, run_phase
from jrc.dgc._config import Options
from jrc.dgc._exchanges.allgather import dense_mean
from jrc.dgc._leaves import Places, Slots, align, pick, put, zero_update
from jrc.dgc._local_gradient import local_gradients
from jrc.dgc._momentum import momentum_step
from jrc.dgc._phases import entry_at, phase_at, plan_phases, ring_all_reduce_bytes
from jrc.dgc._state import DGCState, is_slot


def take_step(
    gradients: PyTree, state: DGCState, params: PyTree | None, options: Options
) -> tuple[PyTree, DGCState]:
    """Turns local gradients into updates that are equal on every replica.

    Args:
        gradients: This replica's.
        state: From `init` or the step before.
        params: The parameters, if known.
        options: Checked ones.

    Returns:
        Updates like the gradients, in the parameters' dtypes, and the new state.
    """
    slots = align(gradients, state)
    if params is not None:
        _check_params(params, gradients, "update")
    targets: list[Array | None] = [None] * len(slots.compressed)
    landed, directions, state = _step(gradients, state, params, slots, targets, 1.0, options)
    updates = _zero_updates(gradients, params, slots)
    updates = _put_updates(updates, params, slots.compressed, landed)
    return _put_updates(updates, params, slots.dense, directions), state


def apply_step(
    gradients: PyTree, state: DGCState, params: PyTree, scale: Array | float, options: Options
) -> tuple[PyTree, DGCState]:
    """Adds the aggregated direction to the parameters, at the entries that were sent alone.

    Args:
        gradients: This replica's.
        state: From `init` or the step before.
        params: The parameters.
        scale: What the direction is multiplied by, `float32[]`.
        options: Checked ones.

    Returns:
        Parameters and state.
    """
    slots = align(gradients, state)
    _check_params(params, gradients, "apply")
    _check_scale(scale)
    params = jax.tree.map(jnp.asarray, params)
    old = pick(params, slots.compressed)
    # Sums of several replicas' entries are not rounded one by one to half precision.
    targets = [x.reshape(-1) if x.dtype == jnp.float32 else None for x in old]
    landed, directions, state = _step(gradients, state, params, slots, targets, scale, options)
    new = [
        _added(x.reshape(-1), change) if target is None else change
        for x, change, target in zip(old, landed, targets, strict=True)
    ]
    shaped = [y.reshape(x.shape) for x, y in zip(old, new, strict=True)]
    params = put(params, slots.compressed, shaped)
    pairs = zip(pick(params, slots.dense), directions, strict=True)
    moved = [_added(x, scale * direction) for x, direction in pairs]
    return put(params, slots.dense, moved), state


def _added(x: Array, change: Array) -> Array:
    """The sum in the dtype of `x`; of 8 bits the largest number is as far as it goes."""
    moved = x.astype(sum_dtype(x.dtype)) + change
    if x.dtype.itemsize == 1:
        limits = jnp.finfo(x.dtype)
        moved = jnp.clip(moved, float(limits.min), float(limits.max))
    return moved.astype(x.dtype)


def _step(
    gradients: PyTree,
    state: DGCState,
    params: PyTree | None,
    slots: Slots,
    targets: list[Array | None],
    scale: Array | float,
    options: Options,
) -> tuple[list[Array], list[Array], DGCState]:
    """What lands on the targets, the directions of the dense path, and the new state."""
    axis = options.axis_name
    replicas = _checked_replicas(options)
    _collectives.num_replicas(options.inner_axis)
    _check_local(pick(gradients, slots.floating), options)
    sizes, rest = ([jnp.size(g) for g in pick(gradients, places)] for places in slots)
    phases = plan_phases(sizes, sum(rest), replicas, options)
    now = phase_at(state.step, phases)

    if options.inner_axis is not None:
        means = dense_mean(_wide(pick(gradients, slots.floating)), options.inner_axis)
        gradients = put(gradients, slots.floating, means)
    # Asked of all replicas before anything changes: they skip a step together or not at all.
    local = local_gradients(gradients, params, slots, state.step, replicas, options)
    ok = _collectives.all_finite(pick(local, slots.floating), axis)
    work = Work(
        gradients=[gradient.reshape(1, -1) for gradient in pick(local, slots.compressed)],
        u=[_collectives.as_local(u, axis) for u in pick(state.u, slots.compressed)],
        v=[_collectives.as_local(v, axis) for v in pick(state.v, slots.compressed)],
        targets=targets,
        scale=jnp.asarray(scale, jnp.float32),
        counts=entry_at([phase.counts for phase in phases], now, jnp.int32),
        ok=ok,
    )
    outcome = run_phase(work, phases, now, replicas, options)
    directions, velocity = _dense_path(local, state, slots, ok, options)
    total = ring_all_reduce_bytes(sum(sizes) + sum(rest), replicas)
    return (
        outcome.updates,
        directions,
        DGCState(
            step=jnp.where(ok, optax.safe_increment(state.step), state.step),
            u=put(state.u, slots.compressed, outcome.u),
            v=put(state.v, slots.compressed, outcome.v),
            velocity=put(state.velocity, slots.dense, velocity),
            skipped=jnp.where(ok, state.skipped, optax.safe_increment(state.skipped)),
            density=entry_at([phase.density for phase in phases], now),
            bytes_sent=entry_at([phase.bytes_sent for phase in phases], now),
            bytes_dense=jnp.float32(total),
        ),
    )


def _wide(gradients: list[Array]) -> list[Array]:
    return [gradient.astype(jnp.float32) for gradient in gradients]


def _dense_path(
    local: PyTree, state: DGCState, slots: Slots, ok: Array, options: Options
) -> tuple[list[Array], list[Array]]:
    """Directions and velocities of the leaves that are too small to compress."""
    means = dense_mean(pick(local, slots.dense), options.axis_name)
    velocities = pick(state.velocity, slots.dense)
    steps = [
        momentum_step(velocity, mean, options.decay)
        for velocity, mean in zip(velocities, means, strict=True)
    ]
    directions = [jnp.where(ok, direction, 0.0) for _, direction in steps]
    moved = [jnp.where(ok, new, old) for (new, _), old in zip(steps, velocities, strict=True)]
    return directions, moved


def _zero_updates(gradients: PyTree, params: PyTree | None, slots: Slots) -> PyTree:
    """The gradients' tree with zeros for leaves that have no state."""
    gradient_leaves, treedef = jax.tree.flatten(gradients, is_leaf=is_slot)
    param_leaves = gradient_leaves if params is None else treedef.flatten_up_to(params)
    others = tuple(place for place in range(len(param_leaves)) if place not in slots.floating)
    zeros = [zero_update(gradient_leaves[place], param_leaves[place]) for place in others]
    return put(gradients, others, zeros)


def _put_updates(
    updates: PyTree, params: PyTree | None, places: Places, new: list[Array]
) -> PyTree:
    """The tree of updates with directions put in, in the shapes and dtypes of the leaves."""
    shapes = [leaf.shape for leaf in pick(updates, places)]
    targets = pick(updates if params is None else params, places)
    shaped = [
        direction.reshape(shape).astype(jnp.result_type(target))
        for direction, shape, target in zip(new, shapes, targets, strict=True)
    ]
    return put(updates, places, shaped)


def _checked_replicas(options: Options) -> int:
    """The axis size, if it is what the user said it is."""
    replicas = _collectives.num_replicas(options.axis_name)
    if options.num_trainers not in (None, replicas):
        raise ValueError(
            f"jrc.scale_by_dgc: num_trainers={options.num_trainers} must be the size of axis "
            f"{options.axis_name!r}, which is {replicas}; leave num_trainers out to take that"
        )
    return replicas


def _check_scale(scale: object) -> None:
    number = isinstance(scale, int | float | np.integer | np.floating | np.ndarray | jax.Array)
    if not number or isinstance(scale, bool) or jnp.ndim(scale):
        raise TypeError(
            f"jrc.scale_by_dgc: apply takes a scale that is one number, got {scale!r}; -0.1 goes "
            "down with a learning rate of 0.1"
        )


def _check_params(params: PyTree, gradients: PyTree, method: str) -> None:
    """That each entry has a place: what lies beyond a leaf would be dropped in silence."""
    if method == "update" and _has_places(params, gradients):
        return
    found, wanted = (
        (jax.tree.structure(tree), [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)])
        for tree in (params, gradients)
    )
    if found != wanted:
        arrived = "no parameters" if params is None else f"{found[0]} of shapes {found[1]}"
        raise ValueError(
            f"jrc.scale_by_dgc: {method} needs parameters in the structure and shapes of the "
            f"gradients, {wanted[0]} of shapes {wanted[1]}, got {arrived}; call "
            f"{method}(gradients, state, params)"
        )


def _has_places(params: PyTree, gradients: PyTree) -> bool:
    """Whether each gradient has a parameter of its shape; where there is none, anything may be."""
    leaves, treedef = jax.tree.flatten(gradients, is_leaf=is_slot)
    try:
        places = treedef.flatten_up_to(params)
    except ValueError:
        return False
    return all(
        is_slot(leaf) or jnp.shape(leaf) == jnp.shape(place)
        for leaf, place in zip(leaves, places, strict=True)
    )


def _check_local(gradients: list[Leaf], options: Options) -> None:
    """That nobody has summed the gradients over an axis yet."""
    for axis in (options.axis_name, options.inner_axis):
        if any(_collectives.is_already_reduced(gradient, axis) for gradient in gradients):
            raise ValueError(
                "jrc.scale_by_dgc: gradients must be local to each replica, got ones that are "
                f"equal along axis {axis!r}: jax.grad with respect to replicated parameters has "
                "summed them already, and compression would save nothing; "
                f'jax.lax.pcast(params, {axis!r}, to="varying") before jax.grad keeps them local'
            )
