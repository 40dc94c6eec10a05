"""The three forms of a step over the compressed leaves, and the switch between them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jrc._typing import Array, Count, Float, Int
from jrc.dgc._accumulate import corrected_step, momentum_step, velocity_behind
from jrc.dgc._exchange import dense_mean, sparse_mean
from jrc.dgc._options import Options
from jrc.dgc._payload import Entries
from jrc.dgc._phases import Form, Phase, entry_at
from jrc.dgc._select import largest
from jrc.dgc._threshold import largest_mask

Flats = list[Float[Array, " n"]]
"""One flat float32 array for each compressed leaf."""


class Work(NamedTuple):
    """What a form works on: local gradients and the replica's own state, leaf by leaf.

    `counts: int32[leaves]` says how many entries the running phase sends of each; `ok` whether
    all gradients of all replicas are finite.
    """

    gradients: Flats
    u: Flats
    v: Flats
    counts: Int[Array, " leaves"]
    ok: Array


class Outcome(NamedTuple):
    """The aggregated direction, equal on every replica, and the replica's new state."""

    updates: Flats
    u: Flats
    v: Flats


def run_phase(work: Work, phases: Sequence[Phase], now: Count, options: Options) -> Outcome:
    """Takes the step in the form of the running phase.

    Every replica is in the same phase, so that the collectives may stand inside the branches.

    Args:
        work: Gradients and state.
        phases: All phases of the run.
        now: Index of the running one.
        options: Momentum, masking and axis.

    Returns:
        Updates and state; zeros and the old state where not `ok`.
    """
    keys = [(phase.form, phase.counts if phase.form == "sparse" else ()) for phase in phases]
    branches = list(dict.fromkeys(keys))
    run = [_program(form, counts, options) for form, counts in branches]
    if len(run) == 1:
        return run[0](work)
    branch = entry_at([branches.index(key) for key in keys], now, jnp.int32)
    return lax.switch(branch, run, work)


def _program(form: Form, counts: Sequence[int], options: Options) -> Callable[[Work], Outcome]:
    """The function for one branch; only the sparse ones differ by their counts."""
    if form == "sparse":
        return partial(sparse_form, counts=counts, options=options)
    return partial(dense_form if form == "dense" else masked_form, options=options)


def dense_form(work: Work, options: Options) -> Outcome:
    """Ordinary momentum of the mean gradient; u is its velocity, v waits."""
    steps = [
        momentum_step(u, gradient, options.decay)
        for u, gradient in zip(work.u, work.gradients, strict=True)
    ]
    means = dense_mean([direction for _, direction in steps], options.axis_name)
    updates = [jnp.where(work.ok, mean, 0.0) for mean in means]
    us = [
        jnp.where(work.ok, velocity_behind(u, mean, options.decay), u)
        for u, mean in zip(work.u, means, strict=True)
    ]
    return Outcome(updates, us, work.v)


def masked_form(work: Work, options: Options) -> Outcome:
    """A dense mean of the largest entries, zeros elsewhere; any counts, in one program."""
    us, vs = _accumulate(work, options)
    masks = [largest_mask(v, count) & work.ok for v, count in zip(vs, work.counts, strict=True)]
    sent = [jnp.where(mask, v, 0.0) for mask, v in zip(masks, vs, strict=True)]
    updates = dense_mean(sent, options.axis_name)
    vs = [jnp.where(mask, 0.0, v) for mask, v in zip(masks, vs, strict=True)]
    if options.factor_masking:
        us = [jnp.where(mask, 0.0, u) for mask, u in zip(masks, us, strict=True)]
    return Outcome(updates, us, vs)


def sparse_form(work: Work, counts: Sequence[int], options: Options) -> Outcome:
    """A gather of the largest entries of every leaf, with their indices."""
    us, vs = _accumulate(work, options)
    chosen = [largest(v, k) for v, k in zip(vs, counts, strict=True)]
    entries = [
        Entries(jnp.where(work.ok, v[indices], 0.0), indices)
        for v, indices in zip(vs, chosen, strict=True)
    ]
    updates = sparse_mean(entries, [v.size for v in vs], options.axis_name)
    vs = [_cleared(v, indices, work.ok) for v, indices in zip(vs, chosen, strict=True)]
    if options.factor_masking:
        us = [_cleared(u, indices, work.ok) for u, indices in zip(us, chosen, strict=True)]
    return Outcome(updates, us, vs)


def _accumulate(work: Work, options: Options) -> tuple[Flats, Flats]:
    """Momentum correction of every leaf."""
    moved = [
        corrected_step(u, v, gradient, options.decay, work.ok)
        for u, v, gradient in zip(work.u, work.v, work.gradients, strict=True)
    ]
    return [u for u, _ in moved], [v for _, v in moved]


def _cleared(x: Float[Array, " n"], indices: Int[Array, " k"], ok: Array) -> Float[Array, " n"]:
    """`x` with zeros at what was sent; touches those entries only."""
    return x.at[indices].set(jnp.where(ok, 0.0, x[indices]), unique_indices=True)
