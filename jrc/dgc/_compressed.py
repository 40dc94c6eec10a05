"""The compressed leaves in one step: accumulate, choose, exchange, clear; the switch of phases."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jrc._typing import Array, Count, Float, Int
from jrc.dgc._collectives import as_local, dense_mean
from jrc.dgc._config import DGCConfig
from jrc.dgc._entries import NOWHERE, Entries, shifted
from jrc.dgc._exchanges import (
    Arrived,
    EntryExchange,
    Exchange,
    Sent,
    TensorExchange,
    Transfer,
    exchanged_by,
    mean_by,
)
from jrc.dgc._momentum import (
    AT,
    corrected_step,
    factor_masked,
    factor_masked_at,
    momentum_step,
    places_in,
    velocity_of_direction,
)
from jrc.dgc._phases import Phase, entry_at, transfers_of
from jrc.dgc._selectors import chosen_by, largest_masks
from jrc.dgc._wires import decoded_by

Rows = list[Float[Array, "1 ..."]]
"""A float32 array for each compressed leaf, as the state keeps it: a row axis before its shape."""


class Work(NamedTuple):
    """The inputs of a step: local gradients and the replica's own state, leaf by leaf.

    Attributes:
        gradients: Local ones.
        u: Velocities.
        v: Accumulated gradients.
        targets: What the direction is added to, in the leaves' shapes; zeros are made where there
            is `None`.
        scale: What the direction is multiplied by, `float32[]`.
        counts: Entries that the running phase sends of each leaf, `int32[leaves]`.
        ok: Whether the step is taken: all gradients of all replicas are finite, `bool[]`.
    """

    gradients: Rows
    u: Rows
    v: Rows
    targets: Sequence[Array | None]
    scale: Array
    counts: Int[Array, " leaves"]
    ok: Array


class Outcome(NamedTuple):
    """The targets with the direction added, equal on every replica, and the replica's new state."""

    targets: list[Array]
    u: Rows
    v: Rows


def run_phase(
    work: Work, phases: Sequence[Phase], now: Count, replicas: int, config: DGCConfig
) -> Outcome:
    """Take the step of the running phase.

    Every replica is in the same phase, so collectives may be inside the branches.

    Args:
        work: Gradients and state.
        phases: All phases of the run.
        now: Index of the running one.
        replicas: N.
        config: Momentum, masking, axis, and how entries are chosen and written.

    Returns:
        Targets and state; unchanged where not `ok`.
    """
    keys = [(phase.exchange, _static_counts(phase)) for phase in phases]
    branches = list(dict.fromkeys(keys))
    run = [_program(exchange, counts, replicas, config) for exchange, counts in branches]
    if len(run) == 1:
        return run[0](work)
    branch = entry_at([branches.index(key) for key in keys], now, jnp.int32)
    return lax.switch(branch, run, work)


def _static_counts(phase: Phase) -> tuple[int, ...]:
    """Return the counts if the program depends on them: only an exchange of entries does."""
    return phase.counts if isinstance(phase.exchange, EntryExchange) else ()


def _program(
    exchange: Exchange | None, counts: tuple[int, ...], replicas: int, config: DGCConfig
) -> Callable[[Work], Outcome]:
    """Return the function for one branch."""
    if exchange is None:
        return partial(uncompressed_step, config=config)
    if isinstance(exchange, EntryExchange):
        return partial(
            entries_step, exchange=exchange, counts=counts, replicas=replicas, config=config
        )
    return partial(tensors_step, exchange=exchange, config=config)


def uncompressed_step(work: Work, config: DGCConfig) -> Outcome:
    """Take a step of ordinary momentum of the mean gradient; u is its velocity, v stays."""
    steps = [
        momentum_step(u, gradient, config.decay)
        for u, gradient in zip(work.u, work.gradients, strict=True)
    ]
    means = dense_mean([direction for _, direction in steps], config.axis)
    us = [
        jnp.where(work.ok, velocity_of_direction(u, mean, config.decay), u)
        for u, mean in zip(work.u, means, strict=True)
    ]
    return Outcome(_add_means(work, means), us, work.v)


def tensors_step(work: Work, exchange: TensorExchange, config: DGCConfig) -> Outcome:
    """Exchange tensors with zeros where nothing is sent; any counts, in one program."""
    us, vs = _accumulate(work, config)
    masks = [mask & work.ok for mask in largest_masks(vs, work.counts)]
    sent = [jnp.where(mask, v, 0.0) for mask, v in zip(masks, vs, strict=True)]
    means = mean_by(exchange, sent, config.axis)
    vs = [jnp.where(mask, 0.0, v) for mask, v in zip(masks, vs, strict=True)]
    if config.factor_masking:
        us = [factor_masked(u, mask) for mask, u in zip(masks, us, strict=True)]
    return Outcome(_add_means(work, means), us, vs)


def entries_step(
    work: Work,
    exchange: EntryExchange,
    counts: tuple[int, ...],
    replicas: int,
    config: DGCConfig,
) -> Outcome:
    """Exchange the chosen entries with their positions.

    Only entries that are sent or that arrive are touched in the state and in the targets.
    """
    us, vs = _accumulate(work, config)
    transfers = transfers_of(exchange, [v.size for v in vs], counts, replicas, config)
    # What follows is not made part of the accumulation, which would take longer to compile.
    us, vs = lax.optimization_barrier((us, vs))
    chosen = [_chosen(vs[part], transfer) for part, transfer in transfers]
    # All that is read of v is read before v is written over; XLA would copy it otherwise.
    us, vs, chosen = lax.optimization_barrier((us, vs, chosen))
    out = Outcome([], [], [])
    for (part, transfer), entries in zip(transfers, chosen, strict=True):
        entries = Entries(jnp.where(work.ok, entries.values, 0.0), entries.positions)
        arrived, sent = exchanged_by(exchange, entries, transfer)
        new_us, new_vs = _clear(us[part], vs[part], sent, transfer, work.ok, config)
        targets = [
            _zeros_of(v, config.axis) if target is None else target
            for v, target in zip(new_vs, work.targets[part], strict=True)
        ]
        new = Outcome(_add_arrived(targets, arrived, transfer, work.scale), new_us, new_vs)
        out = Outcome(*(old + more for old, more in zip(out, new, strict=True)))
    return out


def _accumulate(work: Work, config: DGCConfig) -> tuple[Rows, Rows]:
    """Return u and v of every leaf after momentum correction."""
    new = [
        corrected_step(u, v, gradient, config.decay, work.ok)
        for u, v, gradient in zip(work.u, work.v, work.gradients, strict=True)
    ]
    return [u for u, _ in new], [v for _, v in new]


def _chosen(vs: Rows, transfer: Transfer) -> Entries:
    """Return the entries that the selector chooses."""
    flat = [v.reshape(-1) for v in vs]
    return chosen_by(transfer.selector, flat, transfer.counts, transfer.space)


def _clear(
    us: Rows, vs: Rows, sent: Sent, transfer: Transfer, ok: Array, config: DGCConfig
) -> tuple[Rows, Rows]:
    """Return u and v without what was sent, and with what came back."""
    nowhere_unless_ok = jnp.where(ok, sent.left.positions, NOWHERE)
    left = transfer.space.leaves(Entries(sent.left.values, nowhere_unless_ok), sent.counts)
    vs = [
        v.at[places_in(v, leaf.indices)].set(leaf.values, **AT)
        for v, leaf in zip(vs, left, strict=True)
    ]
    if config.factor_masking:
        us = [factor_masked_at(u, leaf.indices) for u, leaf in zip(us, left, strict=True)]
    if sent.returned is not None:
        back = transfer.space.leaves(sent.returned, None)
        vs = [
            v.at[places_in(v, leaf.indices)].add(leaf.values, **AT)
            for v, leaf in zip(vs, back, strict=True)
        ]
    return us, vs


def _zeros_of(v: Array, axis: str | None) -> Array:
    """Return a target of zeros: typed as v, but equal on all replicas."""
    zeros = jnp.zeros(v.shape[1:], jnp.float32)
    for name in sorted(set(jax.typeof(v).mat.varying) - {axis}):
        zeros = as_local(zeros, name)
    return zeros


def _add_arrived(
    targets: Sequence[Array], arrived: Arrived, transfer: Transfer, scale: Array
) -> list[Array]:
    """Add the mean of what arrived, times a scale, to the leaves.

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

    rows = [target[None] for target in targets]
    return [total[0] for total in lax.fori_loop(0, arrived.words.shape[0], add, rows)]


def _add_means(work: Work, means: Sequence[Array]) -> list[Array]:
    """Return the targets with dense means added."""
    return [
        jnp.where(work.ok, work.scale * mean[0], 0.0)
        if target is None
        else jnp.where(work.ok, target + work.scale * mean[0], target)
        for target, mean in zip(work.targets, means, strict=True)
    ]
