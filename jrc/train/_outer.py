"""One step of one replica with an outer optimizer: a local step, and a round at its end.

A few programs are compiled. The inner step has no collective between replicas; the step that ends a
round has one all-gather (an all-reduce and a small all-gather for dense messages), and with several
fragments there is one such step for each. Which one runs is known on the host from the number of
the step, so that none holds the others' collectives.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jrc._rng import fold_all
from jrc._typing import Array, PyTree, Scalar, Transform
from jrc.outer_optimizers import (
    Fragment,
    LocalState,
    OuterOptimizer,
    Packet,
    Turn,
    as_rows,
    cut_to,
    fragment_count,
    fragments_of,
    header_like,
    header_words,
    padded,
    row_of,
)
from jrc.train._exchange import Arrived, all_finite, applied, bytes_of_exchange, exchanged, packed
from jrc.train._extra_args import differentiated, update, value_function
from jrc.train._gradient import Gradient, gradient, mean_loss
from jrc.train._replica import Replicas, StepInfo, norm_of
from jrc.train._state import TrainState


def outer_step(
    loss_fn: Callable[..., Any],
    tx: Transform,
    outer: OuterOptimizer,
    axes: tuple[str, ...] | None,
    replicas: int,
    accumulate: int,
    turn: Turn,
    state: TrainState,
    batch: PyTree,
) -> tuple[TrainState, StepInfo]:
    """Return the state after one step of one replica, and its report.

    Args:
        loss_fn: The loss function.
        tx: The inner optimizer.
        outer: The outer optimizer.
        axes: The mesh axes of the replicas; those behind the first average gradients in each step.
        replicas: Replicas along the first axis.
        accumulate: Parts of a batch.
        turn: Whether a round ends with this step, and that of which fragment.
        state: With one row in the local state.
        batch: Of this replica.

    Returns:
        The new state and the report.
    """
    own = row_of(state.opt_state.local)
    inner = Replicas(axes[1:] or None) if axes else Replicas(None)
    axis = axes[0] if axes else None
    key = fold_all(state.key, state.step, Replicas(axes).rank)
    given = own.model_state, batch, key, accumulate
    loss_of = lambda params: mean_loss(loss_fn, params, *given)  # noqa: E731
    before, flight, arrived = state, own.in_flight, None
    if flight is not None:
        # Nothing below depends on it until the inner step is done.
        arrived = _landed(outer, turn.receives, state, own, flight, axis)
    found = gradient(loss_fn, differentiated(own.params), *given)
    value_fn = value_function(loss_of, inner.mean)
    own = _after_inner_step(tx, own, found, inner, value_fn, fragment_count(outer))
    if flight is None:
        packet, own = _made(outer, turn.sends, state, own)
        arrived = _landed(outer, turn.receives, state, own, packet, axis)
    state, own = _after_exchange(outer, turn.receives, state, own, arrived)
    if flight is not None:
        packet, own = _made(outer, turn.sends, state, own)
        own = own._replace(in_flight=_waiting(packet, flight))
    info = _info(outer, turn, replicas, before, state, found)
    outer_state = state.opt_state._replace(local=as_rows(own))
    state = TrainState(before.step + 1, state.params, state.model_state, outer_state, state.key)
    return state, info


def _made(
    outer: OuterOptimizer, index: int | None, state: TrainState, own: LocalState
) -> tuple[Packet | None, LocalState]:
    """Return the packet of a fragment, if there is one to send, and what the replica keeps."""
    if index is None:
        return None, own
    fragment = _fragment(outer, index, state)
    return packed(outer, fragment, index, state, own)


def _landed(
    outer: OuterOptimizer,
    index: int | None,
    state: TrainState,
    own: LocalState,
    packet: Packet | None,
    axis: str | None,
) -> Arrived | None:
    """Exchange a packet, which may be longer than what it has, if there is one to receive."""
    if index is None or packet is None:
        return None
    part = _fragment(outer, index, state).of(state.params)
    like = header_like(outer, index, own.model_state)
    words = header_words(outer, index, own.model_state)
    return exchanged(outer, cut_to(packet, words, outer.message_words(part)), like, axis)


def _after_exchange(
    outer: OuterOptimizer,
    index: int | None,
    state: TrainState,
    own: LocalState,
    arrived: Arrived | None,
) -> tuple[TrainState, LocalState]:
    """Return what is shared and what a replica has after an exchange, if there was one."""
    if index is None or arrived is None:
        return state, own
    fragment = _fragment(outer, index, state)
    return applied(outer, fragment, index, state, own, arrived)


def _waiting(packet: Packet | None, longest: Packet) -> Packet:
    """Return a packet as long as the longest one; zeros for none."""
    return jax.tree.map(jnp.zeros_like, longest) if packet is None else padded(packet, longest)


def _fragment(outer: OuterOptimizer, index: int, state: TrainState) -> Fragment:
    return fragments_of(state.params, fragment_count(outer))[index]


def _info(
    outer: OuterOptimizer,
    turn: Turn,
    replicas: int,
    before: TrainState,
    after: TrainState,
    found: Gradient,
) -> StepInfo:
    """Return the report of a step, with what was exchanged in it."""
    report = after.opt_state.report
    left_out = report.left_out - before.opt_state.report.left_out
    sent, density = 0.0, 0.0
    if turn.receives is not None:
        part = jax.eval_shape(_fragment(outer, turn.receives, after).of, after.params)
        words = header_words(outer, turn.receives, after.model_state)
        sent = bytes_of_exchange(outer, part, words, replicas)
        size = sum(x.size for x in jax.tree.leaves(after.params))
        density = outer.entries_sent(part) / max(size, 1)
    return StepInfo(
        loss=report.loss,
        aux=as_rows(found.aux),
        grad_norm=report.grad_norm,
        density=jnp.float32(density),
        bytes_sent=jnp.float32(sent),
        skipped=left_out == replicas,
        bytes_received=jnp.float32(sent),
        norm_kept=report.norm_kept,
        synchronised=jnp.bool_(turn.receives is not None),
        losses=found.loss.astype(jnp.float32)[None],
        left_out=left_out,
    )


def _after_inner_step(
    tx: Transform,
    own: LocalState,
    found: Gradient,
    inner: Replicas,
    value_fn: Callable[[PyTree], Scalar],
    fragments: int,
) -> LocalState:
    """Return what a replica has after a step of its own; one that is not finite changes nothing."""
    grads, loss = inner.mean((found.grads, found.loss.astype(jnp.float32)))
    extra = {"value": loss.astype(found.loss.dtype), "grad": grads, "value_fn": value_fn}
    model_state = jax.tree.map(inner.shared, found.model_state) if inner.axis else found.model_state
    updates, opt_state = update(tx, grads, own.opt_state, own.params, extra)
    new = optax.apply_updates(own.params, updates), model_state, opt_state
    norm = inner.mean(norm_of(found.grads))
    # The parameters, not the gradients: the user's chain may repair a gradient.
    good = jnp.isfinite(loss) & all_finite(new[0]) & _stays_finite(own.model_state, model_state)
    params, model_state, opt_state = jax.tree.map(
        lambda fresh, old: jnp.where(good, fresh, old),
        new,
        (own.params, own.model_state, own.opt_state),
    )
    return own._replace(
        params=params,
        model_state=model_state,
        opt_state=opt_state,
        loss=own.loss + jnp.where(good, loss, 0.0),
        grad_norm=own.grad_norm + jnp.where(good, norm, 0.0),
        steps=own.steps + 1,
        failed=jnp.where(good, own.failed, fragments).astype(jnp.int32),
    )


def _stays_finite(old: PyTree, new: PyTree) -> Array:
    """Whether no float of a model state became infinite or NaN that was neither."""
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    floats = [(x, y) for x, y in pairs if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.stack([True, *((jnp.isfinite(y) | ~jnp.isfinite(x)).all() for x, y in floats)]).all()
