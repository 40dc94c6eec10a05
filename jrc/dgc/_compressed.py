"""The compressed leaves in one step: one function for each kind of phase, and the switch."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jrc._typing import Array, Count, Int
from jrc.dgc._collectives import as_local, dense_mean
from jrc.dgc._config import DGCConfig
from jrc.dgc._entries import NOWHERE, Entries, shifted
from jrc.dgc._exchanges import (
    Arrived,
    EntryExchange,
    Sent,
    TensorExchange,
    Transfer,
    exchanged_by,
    mean_by,
)
from jrc.dgc._leaves import Leaf
from jrc.dgc._momentum import AT, factor_masked, factor_masked_at, places_in
from jrc.dgc._phases import Phase, entry_at
from jrc.dgc._selectors import chosen_by, largest_masks
from jrc.dgc._wires import decoded_by


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


def compressed_step(
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
    run = [_program(phase, config) for phase in programs.values()]
    if len(run) == 1:
        return run[0](own, scalars)
    branches = [list(programs).index(key) for key in keys]
    return lax.switch(entry_at(branches, now, jnp.int32), run, own, scalars)


def _program(phase: Phase, config: DGCConfig) -> Callable[[list[Leaf], Scalars], list[Leaf]]:
    """Return the function of one kind of phase."""
    exchange = phase.exchange
    if exchange is None:
        return partial(uncompressed, config=config)
    if isinstance(exchange, EntryExchange):
        given = {"exchange": exchange, "transfers": phase.transfers}
        return partial(entries_sent, **given, config=config)
    return partial(tensors_sent, exchange=exchange, config=config)


def uncompressed(leaves: list[Leaf], scalars: Scalars, config: DGCConfig) -> list[Leaf]:
    """Take a step of ordinary momentum of the mean gradient; u is its velocity, v stays."""
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
    leaves: list[Leaf], scalars: Scalars, exchange: TensorExchange, config: DGCConfig
) -> list[Leaf]:
    """Exchange tensors with zeros where nothing is sent; any counts, in one program."""
    leaves = _accumulated(leaves, scalars.ok, config)
    found = largest_masks([leaf.v for leaf in leaves], scalars.counts)
    masks = [mask & scalars.ok for mask in found]
    pairs = list(zip(leaves, masks, strict=True))
    means = mean_by(exchange, [jnp.where(mask, leaf.v, 0.0) for leaf, mask in pairs], config.axis)
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
    leaves: list[Leaf],
    scalars: Scalars,
    exchange: EntryExchange,
    transfers: Sequence[tuple[slice, Transfer]],
    config: DGCConfig,
) -> list[Leaf]:
    """Exchange the chosen entries with their positions.

    Only entries that are sent or that arrive are touched in the state and in the targets.
    """
    leaves = _accumulated(leaves, scalars.ok, config)
    # What follows is not made part of the accumulation, which would take longer to compile.
    leaves, _ = _behind_barrier(leaves, ())
    chosen = [_chosen(leaves[part], transfer) for part, transfer in transfers]
    # All that is read of v is read before v is written over; XLA would copy it otherwise.
    leaves, chosen = _behind_barrier(leaves, chosen)
    out: list[Leaf] = []
    for (part, transfer), entries in zip(transfers, chosen, strict=True):
        entries = Entries(jnp.where(scalars.ok, entries.values, 0.0), entries.positions)
        arrived, sent = exchanged_by(exchange, entries, transfer)
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


def _chosen(leaves: list[Leaf], transfer: Transfer) -> Entries:
    """Return the entries that the selector chooses."""
    flat = [leaf.v.reshape(-1) for leaf in leaves]
    return chosen_by(transfer.selector, flat, transfer.counts, transfer.space)


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
        entries = decoded_by(transfer.wire, words, arrived.count, arrived.blocks)
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
