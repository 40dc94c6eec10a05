"""One update, in call order: the step of all leaves, of one device's shards, of one phase.

`step` takes the leaves that `_leaves.flatten` made of the trees, with the state and what the
direction is added to, and returns them after the step. `jrc.scale_by_dgc` and `jrc.scale_by_ef21`
make their updates and states of them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from jrc._mesh_axes import bound_axes, num_replicas
from jrc._nonfinite import finite_everywhere
from jrc._ring import ring_all_reduce_bytes
from jrc._typing import Array, Count, Int, PyTree, Real, Scalar
from jrc.dgc._collectives import as_local, dense_mean
from jrc.dgc._config import DGCConfig
from jrc.dgc._entries import NOWHERE, Entries, shifted
from jrc.dgc._exchanges import (
    Arrived,
    EntryExchange,
    Sent,
    TensorExchange,
    Transfer,
)
from jrc.dgc._leaves import Leaf, Trees
from jrc.dgc._local_gradients import local_gradients
from jrc.dgc._momentum import AT, factor_masked, factor_masked_at, places_in
from jrc.dgc._phases import Phase, entry_at, phase_at, plan_phases, sent_by
from jrc.dgc._selectors import largest_masks
from jrc.dgc._shards import as_split, on_shards, shards_of
from jrc.dgc._state import DGCState


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
    specs = config.param_specs if param_specs is None else param_specs
    shards, leaves = shards_of(trees, leaves, specs, config)
    # Shards have equal sizes, so that one device's share is known without asking the mesh.
    dense_bytes = sum(
        leaf.gradient.size * leaf.gradient.dtype.itemsize / shards.parts(leaf) for leaf in leaves
    )
    local = local_gradients(trees, leaves, state.step, replicas, config)
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
        after += _compressed_step(group, ok, scale, phases, phase_at(now, phases), config)
        tables.append(phases)
    after += _dense_path(dense, ok, scale, config)
    entries = sum(leaf.v.size for leaf in compressed)
    return sorted(after, key=lambda leaf: leaf.place), (ok, *sent_by(now, tables, entries))


class Scalars(NamedTuple):
    """What the leaves of a step have in common.

    Attributes:
        ok: Whether the step is taken: all gradients of all replicas are finite, `bool[]`.
        scale: What the direction is multiplied by, `float32[]`.
        counts: Entries that the running phase sends of each leaf, `int32[leaves]`.
    """

    ok: Array
    scale: Array
    counts: Int[Array, " leaves"]


def _compressed_step(
    leaves: Sequence[Leaf],
    ok: Array,
    scale: Array,
    phases: Sequence[Phase],
    now: Count,
    config: DGCConfig,
) -> list[Leaf]:
    """Take the step of the running phase with leaves that are chosen and sent together.

    Every replica is in the same phase, so collectives may be inside the branches.

    Args:
        leaves: Shards of this device.
        ok: Whether the step is taken, `bool[]`.
        scale: What the direction is multiplied by, `float32[]`.
        phases: All phases of the run.
        now: Index of the running one.
        config: Momentum, masking and axis.

    Returns:
        The leaves with u, v and target of after the step; unchanged ones where not `ok`.
    """
    # Only a dense sum takes leaves with more entries than int32 counts.
    counts = [[min(count, 2**31 - 1) for count in phase.counts] for phase in phases]
    scalars = Scalars(ok, scale, entry_at(counts, now, jnp.int32))
    own = [
        dataclasses.replace(
            leaf,
            gradient=leaf.gradient[None],
            u=as_local(leaf.u, config.axis),
            v=as_local(leaf.v, config.axis),
        )
        for leaf in leaves
    ]
    # The program of an exchange of tensors does not depend on the counts.
    keys = [
        (phase.exchange, phase.counts if isinstance(phase.exchange, EntryExchange) else ())
        for phase in phases
    ]
    programs = dict(zip(keys, phases, strict=True))
    run = [partial(_function_of(phase), phase=phase, config=config) for phase in programs.values()]
    if len(run) == 1:
        return run[0](own, scalars)
    branches = [list(programs).index(key) for key in keys]
    return lax.switch(entry_at(branches, now, jnp.int32), run, own, scalars)


def _function_of(phase: Phase) -> Callable[..., list[Leaf]]:
    """Return the function of one kind of phase."""
    if phase.exchange is None:
        return uncompressed
    return entries_sent if isinstance(phase.exchange, EntryExchange) else tensors_sent


def uncompressed(
    leaves: list[Leaf], scalars: Scalars, phase: Phase, config: DGCConfig
) -> list[Leaf]:
    """Take a step of ordinary momentum of the mean gradient; u is its velocity, v stays."""
    del phase
    momentum = config.momentum
    directions = [momentum.step(leaf.u, leaf.gradient)[1] for leaf in leaves]
    means = dense_mean(directions, config.axis)
    return [
        _moved(
            leaf,
            jnp.where(scalars.ok, momentum.velocity_of(leaf.u, mean), leaf.u),
            leaf.v,
            _added(leaf.target, mean, scalars),
        )
        for leaf, mean in zip(leaves, means, strict=True)
    ]


def tensors_sent(
    leaves: list[Leaf], scalars: Scalars, phase: Phase, config: DGCConfig
) -> list[Leaf]:
    """Exchange tensors with zeros where nothing is sent; any counts, in one program."""
    leaves = _accumulated(leaves, scalars.ok, config)
    found = largest_masks([leaf.v for leaf in leaves], scalars.counts)
    masks = [mask & scalars.ok for mask in found]
    pairs = list(zip(leaves, masks, strict=True))
    tensors = [jnp.where(mask, leaf.v, 0.0) for leaf, mask in pairs]
    means = cast(TensorExchange, phase.exchange).mean(tensors, config.axis)
    return [
        _moved(
            leaf,
            factor_masked(leaf.u, mask) if config.factor_masking else leaf.u,
            jnp.where(mask, 0.0, leaf.v),
            _added(leaf.target, mean, scalars),
        )
        for (leaf, mask), mean in zip(pairs, means, strict=True)
    ]


def entries_sent(
    leaves: list[Leaf], scalars: Scalars, phase: Phase, config: DGCConfig
) -> list[Leaf]:
    """Exchange the chosen entries with their positions.

    Only entries that are sent or that arrive are touched in the state and in the targets.
    """
    exchange = cast(EntryExchange, phase.exchange)
    leaves = _accumulated(leaves, scalars.ok, config)
    # What follows is not made part of the accumulation, which would take longer to compile.
    leaves, _ = _behind_barrier(leaves, ())
    chosen = []
    for part, transfer in phase.transfers:
        flat = [leaf.v.reshape(-1) for leaf in leaves[part]]
        chosen.append(transfer.selector.choose(flat, transfer.counts, transfer.space))
    # All that is read of v is read before v is written over; XLA would copy it otherwise.
    leaves, chosen = _behind_barrier(leaves, chosen)
    out: list[Leaf] = []
    for (part, transfer), entries in zip(phase.transfers, chosen, strict=True):
        entries = Entries(jnp.where(scalars.ok, entries.values, 0.0), entries.positions)
        arrived, sent = exchange.exchange(entries, transfer)
        cleared = _cleared(leaves[part], sent, transfer, scalars.ok, config)
        out += _with_arrived(cleared, arrived, transfer, scalars.scale)
    return out


def _accumulated(leaves: list[Leaf], ok: Array, config: DGCConfig) -> list[Leaf]:
    """Return the leaves with u and v after momentum correction."""
    pairs = [config.momentum.correct(leaf.u, leaf.v, leaf.gradient, ok) for leaf in leaves]
    return [_moved(leaf, *pair, leaf.target) for leaf, pair in zip(leaves, pairs, strict=True)]


def _moved(leaf: Leaf, u: Array, v: Array, target: Any) -> Leaf:
    """Return a leaf with the state and the target of after the step."""
    return dataclasses.replace(leaf, gradient=None, u=u, v=v, target=target)


def _behind_barrier(leaves: list[Leaf], others: Any) -> tuple[list[Leaf], Any]:
    """Return the leaves and others, with u and v that XLA computes before anything behind."""
    state = [leaf.u for leaf in leaves], [leaf.v for leaf in leaves]
    (us, vs), others = lax.optimization_barrier((state, others))
    moved = zip(leaves, us, vs, strict=True)
    return [dataclasses.replace(leaf, u=u, v=v) for leaf, u, v in moved], others


def _cleared(
    leaves: list[Leaf], sent: Sent, transfer: Transfer, ok: Array, config: DGCConfig
) -> list[Leaf]:
    """Return the leaves without what was sent in u and v, and with what came back in v."""
    nowhere_unless_ok = jnp.where(ok, sent.left.positions, NOWHERE)
    left = transfer.space.leaves(Entries(sent.left.values, nowhere_unless_ok), sent.counts)
    back = None if sent.returned is None else transfer.space.leaves(sent.returned, None)
    out = []
    for i, leaf in enumerate(leaves):
        u, v = leaf.u, leaf.v
        v = v.at[places_in(v, left[i].indices)].set(left[i].values, **AT)
        if config.factor_masking:
            u = factor_masked_at(u, left[i].indices)
        if back is not None:
            v = v.at[places_in(v, back[i].indices)].add(back[i].values, **AT)
        out.append(dataclasses.replace(leaf, u=u, v=v))
    return out


def _with_arrived(
    leaves: list[Leaf], arrived: Arrived, transfer: Transfer, scale: Array
) -> list[Leaf]:
    """Return the leaves with the mean of what arrived, times a scale, added to their targets.

    Row after row, in rank order: within one row positions are unique, so no two additions race and
    the order of the sums is the same everywhere. Only entries that arrived are touched.
    """
    starts = jnp.asarray(arrived.starts, jnp.uint32)

    def add(row: Array, totals: list[Array]) -> list[Array]:
        words = lax.dynamic_index_in_dim(arrived.words, row, keepdims=False)
        entries = transfer.wire.decode(words, arrived.count, arrived.blocks)
        entries = Entries(
            # A mean of few entries costs less than a division of the whole tensor.
            scale * (entries.values / transfer.replicas),
            shifted(entries.positions, starts[row], arrived.blocks),
        )
        found = transfer.space.leaves(entries, arrived.counts)
        return [
            total.at[places_in(total, leaf.indices)].add(leaf.values, **AT)
            for total, leaf in zip(totals, found, strict=True)
        ]

    rows = [
        (_zeros_of(leaf.v, transfer.axis) if leaf.target is None else leaf.target)[None]
        for leaf in leaves
    ]
    totals = lax.fori_loop(0, arrived.words.shape[0], add, rows)
    return [
        dataclasses.replace(leaf, target=total[0])
        for leaf, total in zip(leaves, totals, strict=True)
    ]


def _zeros_of(v: Array, axis: str | None) -> Array:
    """Return a target of zeros: typed as v, but equal on all replicas."""
    zeros = jnp.zeros(v.shape[1:], jnp.float32)
    for name in sorted(set(jax.typeof(v).mat.varying) - {axis}):
        zeros = as_local(zeros, name)
    return zeros


def _added(target: Any, mean: Array, scalars: Scalars) -> Array:
    """Return a target with a scaled dense mean added; the target where the step is not taken."""
    if target is None:
        return jnp.where(scalars.ok, scalars.scale * mean[0], 0.0)
    return jnp.where(scalars.ok, target + scalars.scale * mean[0], target)


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


def state_after(state: DGCState, leaves: Sequence[Leaf], report: Report) -> Any:
    """Return the state after a step, of the same class."""
    compressed = [leaf for leaf in leaves if leaf.compressed]
    velocity = [leaf.velocity for leaf in leaves if leaf.velocity is not None]
    ok = report.ok
    like = lambda tree, arrays: jax.tree.structure(tree).unflatten(arrays)  # noqa: E731
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
