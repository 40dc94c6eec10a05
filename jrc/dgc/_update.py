"""One update, in call order.

`update` returns the direction as an array for each parameter, `apply` adds it to the parameters,
and `update_estimates` (EF21) to the estimates in the state. All three flatten the trees (`_leaves`)
and take one `step`: checks, how the leaves are split (`_shards`), local gradients (`_clip`,
`_regularize`), and then on each device the compressed leaves (`_compressed`) and the others.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jrc._mesh_axes import bound_axes, num_replicas
from jrc._nonfinite import finite_everywhere
from jrc._ring import ring_all_reduce_bytes
from jrc._tree import added, sum_dtype
from jrc._typing import Array, Count, PyTree, Real, Scalar
from jrc._validate import scalar
from jrc.dgc._clip import clip_factor
from jrc.dgc._collectives import dense_mean, is_already_reduced
from jrc.dgc._compressed import compressed_step
from jrc.dgc._config import DGCConfig
from jrc.dgc._leaves import Leaf, Trees, flatten, like, updates_of
from jrc.dgc._phases import Phase, entry_at, phase_at, plan_phases
from jrc.dgc._shards import as_split, on_shards, shards_of
from jrc.dgc._state import DGCState, EF21State, is_placeholder


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
    trees, leaves = flatten(gradients, state, params, "update")
    leaves, report = step(trees, leaves, state, 1.0, config, param_specs)
    velocity = [leaf.velocity for leaf in leaves if not leaf.compressed]
    return updates_of(trees, leaves), _state_after(state, leaves, velocity, report)


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
    trees, leaves = flatten(gradients, state, params, "apply")
    remedy = "Pass -0.1 to descend with a learning rate of 0.1."
    scalar(scale, "scale", remedy=remedy)
    new = [x if is_placeholder(x) else jnp.asarray(x) for x in trees.params or ()]
    # Sums of several replicas' entries are not rounded one by one to half precision.
    direct = {
        leaf.place for leaf in leaves if leaf.compressed and new[leaf.place].dtype == "float32"
    }
    leaves = [
        dataclasses.replace(leaf, target=new[leaf.place]) if leaf.place in direct else leaf
        for leaf in leaves
    ]
    leaves, report = step(trees, leaves, state, scale, config, param_specs)
    for leaf in leaves:
        landed = leaf.target
        new[leaf.place] = landed if leaf.place in direct else added(new[leaf.place], landed)
    velocity = [leaf.velocity for leaf in leaves if not leaf.compressed]
    return trees.treedef.unflatten(new), _state_after(state, leaves, velocity, report)


def update_estimates(
    gradients: PyTree,
    state: EF21State,
    params: PyTree | None,
    config: DGCConfig,
    param_specs: PyTree = None,
) -> tuple[PyTree, EF21State]:
    """Return the estimates of EF21 as updates, zeros if the step is skipped, and the new state.

    Args:
        gradients: This replica's.
        state: From `init` or the step before.
        params: The parameters, if known.
        config: The arguments of `scale_by_ef21`; its momentum is an `Average`.
        param_specs: How parameters are split; `None` takes that of the config.
    """
    trees, leaves = flatten(gradients, state, params, "update", EF21State)
    estimates = [
        dataclasses.replace(leaf, target=leaf.velocity, velocity=None) if leaf.compressed else leaf
        for leaf in leaves
    ]
    leaves, report = step(trees, estimates, state, 1.0, config, param_specs)
    after = [leaf.target if leaf.compressed else leaf.velocity for leaf in leaves]
    taken = [
        dataclasses.replace(leaf, target=jnp.where(report.ok, x, 0.0))
        for leaf, x in zip(leaves, after, strict=True)
    ]
    return updates_of(trees, taken), _state_after(state, leaves, after, report)


class Report(NamedTuple):
    """What a step did, besides its leaves.

    Attributes:
        ok: Whether it was taken: all gradients on all devices are finite, `bool[]`.
        density: Share of the compressed entries that is sent, `float32[]`.
        bytes_sent: Bytes that this device sends, `float32[]`.
        bytes_dense: Bytes that a dense all-reduce would have sent, `float32[]`.
    """

    ok: Array
    density: Scalar
    bytes_sent: Scalar
    bytes_dense: Scalar


def step(
    trees: Trees,
    leaves: list[Leaf],
    state: DGCState,
    scale: Array | Real,
    config: DGCConfig,
    param_specs: PyTree,
) -> tuple[list[Leaf], Report]:
    """Return the leaves after one step, and its report.

    Args:
        trees: The trees of the step.
        leaves: Their floating leaves; a target is what the direction is added to.
        state: The state before.
        scale: What the direction is multiplied by.
        config: The arguments of the transform.
        param_specs: How parameters are split; `None` takes that of the config.
    """
    replicas = _checked_replicas(config)
    _check_local([leaf.gradient for leaf in leaves], config)
    specs = config.param_specs if param_specs is None else param_specs
    shards, leaves = shards_of(trees, leaves, specs, config)
    # Shards have equal sizes, so that one device's share is known without asking the mesh.
    dense_bytes = sum(
        leaf.gradient.size * leaf.gradient.dtype.itemsize / shards.parts(leaf) for leaf in leaves
    )
    local = _local_gradients(trees, leaves, state.step, replicas, config)
    local = [as_split(leaf, shards.mesh) for leaf in local]

    split, whole = [leaf.specs() for leaf in leaves], PartitionSpec()
    run = on_shards(
        partial(_device_step, replicas=replicas, config=config),
        shards,
        (split, whole, whole),
        (split, whole),
        config.axis,
    )
    leaves, (ok, density, sent) = run(local, state.step, jnp.asarray(scale, jnp.float32))
    dense = jnp.float32(ring_all_reduce_bytes(dense_bytes, replicas, itemsize=1))
    return leaves, Report(ok, density, sent, dense)


def _state_after(
    state: DGCState, leaves: Sequence[Leaf], velocity: Sequence[Array], report: Report
) -> Any:
    """Return the state after a step, of the same class, with the given velocities."""
    compressed = [leaf for leaf in leaves if leaf.compressed]
    ok = report.ok
    return state._replace(
        step=jnp.where(ok, optax.safe_increment(state.step), state.step),
        u=like(state.u, [leaf.u for leaf in compressed]),
        v=like(state.v, [leaf.v for leaf in compressed]),
        velocity=like(state.velocity, velocity),
        skipped=jnp.where(ok, state.skipped, optax.safe_increment(state.skipped)),
        density=report.density,
        bytes_sent=report.bytes_sent,
        bytes_dense=report.bytes_dense,
    )


def _local_gradients(
    trees: Trees, leaves: list[Leaf], now: Count, replicas: int, config: DGCConfig
) -> list[Leaf]:
    """Return the leaves with what enters the momentum: `G = clip(g) + lambda w`, float32.

    Compressed leaves are clipped, before `rampup_begin_step` only with `clip_before_rampup`.
    """
    local = [leaf.gradient for leaf in leaves]
    if config.inner_axis is not None:
        local = dense_mean(_as_float32(local), config.inner_axis)
    local = _as_float32(local)
    if (bound := config.local_grad_clip_norm) is not None:
        clips = config.clip_before_rampup | (now >= config.rampup_begin_step)
        manual = set(bound_axes(config.axis))
        for i, leaf in enumerate(leaves):
            if leaf.compressed:
                given = local[i], bound, replicas, config.clip_scaling, sorted(leaf.axes & manual)
                local[i] = local[i] * jnp.where(clips, clip_factor(*given), 1.0)
    if config.regularization is not None:
        # A float64 factor, or parameters of it, would make the state float64.
        local = _regularized(trees, leaves, _as_float32(local), config.regularization)
    local = [config.momentum.weighted(gradient, now) for gradient in _as_float32(local)]
    pairs = zip(leaves, local, strict=True)
    return [dataclasses.replace(leaf, gradient=gradient) for leaf, gradient in pairs]


def _regularized(
    trees: Trees, leaves: list[Leaf], local: list[Array], transform: optax.GradientTransformation
) -> list[Array]:
    """Return the gradients after the user's transform, which takes trees and not lists."""
    places = [leaf.place for leaf in leaves]

    def tree_of(arrays: list[Array]) -> PyTree:
        own = dict(zip(places, arrays, strict=True))
        masked = optax.MaskedNode()
        return trees.treedef.unflatten(own.get(i, masked) for i in range(len(trees.gradients)))

    params = None
    if trees.params is not None:
        arrays = [jnp.asarray(trees.params[place]) for place in places]
        params = tree_of([x.astype(sum_dtype(x.dtype)) for x in arrays])
    tree = tree_of(local)
    updates, _ = transform.update(tree, transform.init(tree), params)
    found = trees.treedef.flatten_up_to(updates)
    return [found[place] for place in places]


def _as_float32(gradients: Sequence[Any]) -> list[Array]:
    return [gradient.astype(jnp.float32) for gradient in gradients]


def _device_step(
    leaves: list[Leaf], now: Count, scale: Array, *, replicas: int, config: DGCConfig
) -> tuple[list[Leaf], tuple[Array, Scalar, Scalar]]:
    """Take one step with the shards of this device; return them, and `ok`, density and bytes sent.

    Leaves that are split over the same axes are chosen and sent together. What several devices
    hold in common must be chosen alike by all of them, and so apart from what only one holds.
    """
    compressed = [leaf for leaf in leaves if leaf.compressed]
    dense = [leaf for leaf in leaves if not leaf.compressed]
    # Known before anything changes. Where it is false every new value is the old one.
    gradients = [leaf.gradient for leaf in (*compressed, *dense)]
    ok = finite_everywhere(gradients, bound_axes(config.axis))
    after: list[Leaf] = []
    tables: list[tuple[Phase, ...]] = []
    rest = sum(leaf.gradient.size for leaf in dense)
    for axes in dict.fromkeys(leaf.axes for leaf in compressed) or [frozenset()]:
        group = [leaf for leaf in compressed if leaf.axes == axes]
        sizes = [leaf.v.size for leaf in group]
        phases = plan_phases(sizes, 0 if tables else rest, replicas, config)
        after += compressed_step(group, ok, scale, phases, phase_at(now, phases), config)
        tables.append(phases)
    after += _dense_path(dense, ok, scale, config)
    entries = sum(leaf.v.size for leaf in compressed)
    return sorted(after, key=lambda leaf: leaf.place), (ok, *_sent(now, tables, entries))


def _dense_path(leaves: list[Leaf], ok: Array, scale: Array, config: DGCConfig) -> list[Leaf]:
    """Return the leaves that are too small to compress after a step of the mean gradient."""
    out = []
    means = dense_mean([leaf.gradient for leaf in leaves], config.axis)
    for leaf, mean in zip(leaves, means, strict=True):
        velocity, direction = config.momentum.step(leaf.velocity, mean)
        velocity = jnp.where(ok, velocity, leaf.velocity)
        target = scale * jnp.where(ok, direction, 0.0)
        out.append(dataclasses.replace(leaf, gradient=None, velocity=velocity, target=target))
    return out


def _sent(now: Count, tables: Sequence[Sequence[Phase]], entries: int) -> tuple[Scalar, Scalar]:
    """Return the density and the bytes of the running phase, of all groups of leaves."""
    rows = list(zip(*tables, strict=True))
    at = phase_at(now, tables[0])
    density = [
        sum(sum(phase.counts) for phase in row) / entries if entries else 1.0 for row in rows
    ]
    return entry_at(density, at), entry_at([sum(p.bytes_sent for p in row) for row in rows], at)


def _checked_replicas(config: DGCConfig) -> int:
    """Return the axis size after checking it against `num_trainers`."""
    num_replicas(config.inner_axis)
    replicas = num_replicas(config.axis)
    if config.num_trainers not in (None, replicas):
        raise ValueError(
            f"num_trainers must be the size of axis {config.axis!r}, which is "
            f"{replicas}, got {config.num_trainers}. Leave num_trainers out to take that size."
        )
    return replicas


def _check_local(gradients: list[jax.Array], config: DGCConfig) -> None:
    """Raise if gradients were summed over an axis before."""
    for axis in (config.axis, config.inner_axis):
        if any(is_already_reduced(gradient, axis) for gradient in gradients):
            raise ValueError(
                "gradients must be local to each replica, got ones that are "
                f"equal along axis {axis!r}: jax.grad with respect to replicated parameters sums "
                "them, and compression would save nothing. "
                f'Call jax.lax.pcast(params, {axis!r}, to="varying") before jax.grad.'
            )
