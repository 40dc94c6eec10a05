"""The exchange of a round: a packet is made, gathered from all replicas, and applied.

Without overlap all three happen in the step that ends the round. With it the packet waits in the
state: the next step begins with the exchange, which nothing of its inner step depends on, and ends
with its result.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jrc._layout import Layout
from jrc._nonfinite import chosen, finite_everywhere
from jrc._specs import number_of_shards
from jrc._tree import is_typed_key, sum_dtype
from jrc._typing import Array, PyTree
from jrc.dgc._internal import gather
from jrc.outer_optimizers import LocalState, OuterOptimizer, RoundReport
from jrc.outer_optimizers._internal import (
    Fragment,
    Header,
    Packet,
    blend_of,
    from_words,
    header_like,
    overlap_of,
    to_words,
)
from jrc.train._state import TrainState


class Arrived(NamedTuple):
    """What all replicas have of an exchange.

    Attributes:
        headers: Of all replicas, in rank order, `uint32[replicas, words]`.
        messages: Of all replicas in rank order, or the sum of the valid ones.
        valid: Whether this replica's own counts, `bool[]`.
    """

    headers: Array
    messages: Array
    valid: Array


def packed(
    outer: OuterOptimizer,
    fragment: Fragment,
    layout: Layout,
    params: PyTree,
    own: LocalState,
) -> tuple[Packet, LocalState]:
    """Return what a device sends of a fragment, and what it has afterwards.

    Args:
        outer: The outer optimizer.
        fragment: The part of the parameters.
        layout: How a replica is split.
        params: The shared parameters.
        own: What the replica has.

    Returns:
        The packet, and its own without what was sent.
    """
    difference = jax.tree.map(_difference, fragment.of(params), fragment.of(own.params))
    # Counts on all devices of the replica or on none.
    valid = (own.failed == 0) & finite_everywhere(difference, layout.inside)
    difference = jax.tree.map(lambda x: jnp.where(valid, x, 0.0), difference)
    before = fragment.entry_of(own.outer)
    encoded = outer.encode(difference, before)
    local = chosen(valid, encoded.local, before)
    carried = own.model_state if fragment.is_last else None
    kept = _squares(encoded.kept, fragment, layout)
    header = Header(valid, own.loss, own.grad_norm, own.steps, kept, carried)
    zero, none = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
    own = own._replace(
        outer=fragment.with_entry(own.outer, local),
        loss=zero,
        grad_norm=zero,
        steps=none,
        failed=jnp.maximum(own.failed - 1, 0),
    )
    return Packet(to_words(header), encoded.message), own


def _squares(kept: Array, fragment: Fragment, layout: Layout) -> Array:
    """Return the sum of squares of a whole replica; what lies on several devices counts once."""
    kept = jnp.asarray(kept, jnp.float32)
    if not layout.inside:
        return kept.sum()
    if kept.ndim:
        sizes = layout.mesh.shape
        devices = math.prod(sizes[name] for name in layout.inside)
        specs = jax.tree.leaves(fragment.each(layout.params))
        copies = [devices // number_of_shards(spec, sizes) for spec in specs]
        kept = kept / jnp.asarray(copies, jnp.float32)
    return lax.psum(kept.sum(), layout.inside)


def exchanged(
    outer: OuterOptimizer, fragment: Fragment, axis: str | None, packet: Packet, model_state: PyTree
) -> Arrived:
    """Exchange the packets of all replicas by one all-gather.

    Dense messages are added in an all-reduce, beside a small all-gather of the headers.

    Args:
        outer: The outer optimizer.
        fragment: The part of the parameters.
        axis: The axis of the replicas.
        packet: Of this replica, or of this device of it.
        model_state: One like that in the header.
    """
    words, message = packet
    valid = from_words(words[None], header_like(fragment, model_state)).valid[0]
    if outer.collective == "all_reduce":
        rows = gather(words, axis)
        message = jnp.where(valid, message, 0.0)
        messages = message if axis is None else lax.psum(message, axis)
    else:
        rows = gather(jnp.concatenate([words, message]), axis)
        rows, messages = rows[:, : words.size], rows[:, words.size :]
    return Arrived(rows, messages, valid)


def applied(
    outer: OuterOptimizer,
    fragment: Fragment,
    state: TrainState,
    own: LocalState,
    arrived: Arrived,
) -> tuple[TrainState, LocalState]:
    """Return the shared state after an exchange, with stale rows, and what a replica goes on with.

    Every replica computes the shared state from the same gathered words in the same order, bit for
    bit. It stays as it is if no replica is valid.
    """
    before = state.opt_state
    headers = from_words(arrived.headers, header_like(fragment, own.model_state))
    momentum = fragment.entry_of(before.shared)
    carries = headers.model_state is not None
    old = fragment.of(state.params), momentum, state.model_state if carries else None
    params, momentum = outer.decode(old[0], momentum, arrived.messages, headers.valid)
    mean = lambda rows, like: _mean_of_rows(rows, headers.valid, like)  # noqa: E731
    new = params, momentum, jax.tree.map(mean, headers.model_state, old[2])
    some = headers.valid.any()
    params, momentum, statistics = chosen(some, new, old)
    outer_state = before._replace(
        rounds=before.rounds + 1,
        shared=fragment.with_entry(before.shared, momentum),
        report=_report(headers, before.report, fragment.index),
    )
    model_state = statistics if carries else state.model_state
    state = TrainState(
        state.step, fragment.put(state.params, params), model_state, outer_state, state.key
    )
    if overlap_of(outer):
        go_on = lambda own, shared: _blended(outer, own, shared, arrived.valid)  # noqa: E731
        params = jax.tree.map(go_on, fragment.of(own.params), params)
        if carries:
            statistics = jax.tree.map(go_on, own.model_state, statistics)
    own = own._replace(params=fragment.put(own.params, params))
    return state, own._replace(model_state=statistics) if carries else own


def _blended(outer: OuterOptimizer, own: Array, shared: Array, valid: Array) -> Array:
    """Return what a replica goes on with after an overlapped exchange.

    Counters and keys of a model state are its own, which has taken one more step; if its
    contribution was left out, all is shared.
    """
    alpha, mixed = blend_of(outer), own
    if jnp.issubdtype(own.dtype, jnp.inexact):
        wide = sum_dtype(own.dtype)
        both = alpha * own.astype(wide) + (1 - alpha) * shared.astype(wide)
        mixed = both.astype(own.dtype) if alpha else shared
    return jnp.where(valid, mixed, shared)


def _mean_of_rows(rows: Array, valid: Array, like: Array) -> Array:
    """Return the mean of the valid rows of floats, and the first valid row of all else."""
    first = rows[jnp.argmax(valid)]
    if is_typed_key(rows) or not jnp.issubdtype(rows.dtype, jnp.inexact):
        return first
    wide = rows.astype(sum_dtype(rows.dtype))
    mask = valid.reshape(-1, *(1 for _ in jnp.shape(like)))
    total = jnp.where(mask, wide, 0).sum(0)
    count = jnp.maximum(valid.sum(), 1).astype(total.dtype)
    return (total / count).astype(rows.dtype)


def _report(headers: Header, before: RoundReport, index: int) -> RoundReport:
    """Return what is known of a round from the headers of all replicas."""
    steps = jnp.where(headers.valid, headers.steps, 0).sum().astype(jnp.float32)
    mean = lambda sums: jnp.where(headers.valid, sums, 0.0).sum() / steps  # noqa: E731
    kept = jnp.where(headers.valid, headers.kept, 0.0).sum()
    left_out = (~headers.valid).sum().astype(jnp.int32)
    return RoundReport(
        mean(headers.loss),
        mean(headers.grad_norm),
        before.kept.at[index].set(kept),
        before.left_out + left_out,
    )


def _difference(shared: Array, own: Array) -> Array:
    """Return shared parameters less a replica's own, float32, computed in no fewer bits."""
    wide = sum_dtype(shared.dtype)
    return (shared.astype(wide) - own.astype(wide)).astype(jnp.float32)
