"""The forms of a step over the compressed leaves, and the switch between them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jrc._typing import Array, Count, Float, Int
from jrc.dgc._config import Options
from jrc.dgc._entries import NOWHERE, Entries, Space
from jrc.dgc._exchanges.allgather import AT, dense_mean, gather_entries, mean_onto
from jrc.dgc._exchanges.sharded import owners_of, shard_entries
from jrc.dgc._momentum import corrected_step, momentum_step, velocity_behind
from jrc.dgc._phases import Form, Phase, entry_at
from jrc.dgc._selectors import Blocked
from jrc.dgc._selectors.threshold import largest_masks

Rows = list[Float[Array, "1 n"]]
"""One float32 row for each compressed leaf, as the state keeps it.

What is reshaped first XLA does not write over in place, and copies.
"""

_SPARSE = ("gather", "sharded")
"""The forms that send entries with their positions."""


class Work(NamedTuple):
    """What a form works on: local gradients and the replica's own state, leaf by leaf.

    Attributes:
        gradients: Local ones.
        u: Velocities.
        v: Accumulated gradients.
        targets: What the direction is added to, flat; zeros are made where there is `None`.
        scale: What the direction is multiplied by, `float32[]`.
        counts: How many entries the running phase sends of each leaf, `int32[leaves]`.
        ok: Whether all gradients of all replicas are finite.
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

    updates: list[Array]
    u: Rows
    v: Rows


def run_phase(
    work: Work, phases: Sequence[Phase], now: Count, replicas: int, options: Options
) -> Outcome:
    """Takes the step in the form of the running phase.

    Every replica is in the same phase, so that the collectives may stand inside the branches.

    Args:
        work: Gradients and state.
        phases: All phases of the run.
        now: Index of the running one.
        replicas: N.
        options: Momentum, masking, axis, and how entries are chosen and exchanged.

    Returns:
        Targets and state; unchanged where not `ok`.
    """
    keys = [(phase.form, phase.counts if phase.form in _SPARSE else ()) for phase in phases]
    branches = list(dict.fromkeys(keys))
    run = [_program(form, counts, replicas, options) for form, counts in branches]
    if len(run) == 1:
        return run[0](work)
    branch = entry_at([branches.index(key) for key in keys], now, jnp.int32)
    return lax.switch(branch, run, work)


def _program(
    form: Form, counts: tuple[int, ...], replicas: int, options: Options
) -> Callable[[Work], Outcome]:
    """The function for one branch; only the sparse ones differ by their counts."""
    if form in _SPARSE:
        return partial(sparse_form, form=form, counts=counts, replicas=replicas, options=options)
    return partial(dense_form if form == "dense" else masked_form, options=options)


def dense_form(work: Work, options: Options) -> Outcome:
    """Ordinary momentum of the mean gradient; u is its velocity, v waits."""
    steps = [
        momentum_step(u, gradient, options.decay)
        for u, gradient in zip(work.u, work.gradients, strict=True)
    ]
    means = dense_mean([direction for _, direction in steps], options.axis_name)
    us = [
        jnp.where(work.ok, velocity_behind(u, mean, options.decay), u)
        for u, mean in zip(work.u, means, strict=True)
    ]
    return Outcome(_landed(work, means), us, work.v)


def masked_form(work: Work, options: Options) -> Outcome:
    """A dense mean of the largest entries, zeros elsewhere; any counts, in one program."""
    us, vs = _accumulate(work, options)
    masks = [mask & work.ok for mask in largest_masks(vs, work.counts)]
    sent = [jnp.where(mask, v, 0.0) for mask, v in zip(masks, vs, strict=True)]
    means = dense_mean(sent, options.axis_name)
    vs = [jnp.where(mask, 0.0, v) for mask, v in zip(masks, vs, strict=True)]
    if options.factor_masking:
        us = [jnp.where(mask, 0.0, u) for mask, u in zip(masks, us, strict=True)]
    return Outcome(_landed(work, means), us, vs)


def sparse_form(
    work: Work, form: Form, counts: tuple[int, ...], replicas: int, options: Options
) -> Outcome:
    """An exchange of the largest entries, with their positions.

    Only entries that are sent or that arrive are touched in the state and in the targets.
    """
    us, vs = _accumulate(work, options)
    space = Space(tuple(v.size for v in vs))
    selector, wire, axis = options.selector_for(form), options.wire, options.axis_name
    # What follows is not made part of the accumulation, which would take longer to compile.
    us, vs = lax.optimization_barrier((us, vs))
    entries = selector.choose([v.reshape(-1) for v in vs], counts, space)
    # All that is read of v is read before v is written over; XLA would copy it otherwise.
    us, vs, entries = lax.optimization_barrier((us, vs, entries))
    known = counts if selector.by_leaf else None
    if form == "sharded":
        assert isinstance(selector, Blocked)
        owners = owners_of(space, counts, selector.size, replicas)
        arrived, sent = shard_entries(_if(work.ok, entries), owners, wire, axis)
    else:
        arrived, sent = gather_entries(_if(work.ok, entries), space, known, wire, axis)
    left = space.leaves(_nowhere_unless(work.ok, sent.left), sent.counts)
    vs = [v.at[0, leaf.indices].set(leaf.values, **AT) for v, leaf in zip(vs, left, strict=True)]
    if options.factor_masking:
        us = [u.at[0, leaf.indices].set(0.0, **AT) for u, leaf in zip(us, left, strict=True)]
    if sent.kept is not None:
        back = space.leaves(sent.kept, None)
        vs = [v.at[0, x.indices].add(x.values, **AT) for v, x in zip(vs, back, strict=True)]
    targets = [
        # Not like v, which differs between replicas in its type.
        jnp.zeros(v.size, jnp.float32) if target is None else target
        for v, target in zip(vs, work.targets, strict=True)
    ]
    return Outcome(mean_onto(targets, arrived, space, wire, work.scale, replicas), us, vs)


def _accumulate(work: Work, options: Options) -> tuple[Rows, Rows]:
    """Momentum correction of every leaf."""
    moved = [
        corrected_step(u, v, gradient, options.decay, work.ok)
        for u, v, gradient in zip(work.u, work.v, work.gradients, strict=True)
    ]
    return [u for u, _ in moved], [v for _, v in moved]


def _landed(work: Work, means: Rows) -> list[Array]:
    """The targets with a dense mean added."""
    return [
        jnp.where(work.ok, work.scale * mean.reshape(-1), 0.0)
        if target is None
        else jnp.where(work.ok, target + work.scale * mean.reshape(-1), target)
        for target, mean in zip(work.targets, means, strict=True)
    ]


def _if(ok: Array, entries: Entries) -> Entries:
    """The entries, or zeros in their places."""
    return Entries(jnp.where(ok, entries.values, 0.0), entries.positions)


def _nowhere_unless(ok: Array, entries: Entries) -> Entries:
    """The entries, or none."""
    return Entries(entries.values, jnp.where(ok, entries.positions, NOWHERE))
