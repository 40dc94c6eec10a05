"""One step of one replica with an outer optimizer: a local step, and a round at its end.

Two programs are compiled. The inner step has no collective between replicas; the step that ends a
round has one all-gather (an all-reduce and a small all-gather for dense messages). Which one runs
is known on the host from the number of the step, so that neither holds the other's collectives.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jrc._rng import fold_all
from jrc._tree import is_typed_key
from jrc._typing import Array, PyTree, Scalar, Transform
from jrc.dgc import ring_all_reduce_bytes
from jrc.outer_optimizers import (
    LocalState,
    OuterOptimizer,
    OuterState,
    RoundReport,
    as_rows,
    from_words,
    row_of,
    to_words,
)
from jrc.train._gradient import Gradient, gradient
from jrc.train._replica import Replicas, StepInfo, norm_of
from jrc.train._state import TrainState


class Header(NamedTuple):
    """What a replica sends in front of its message, without loss.

    Attributes:
        valid: Whether every step of the round and the difference were finite, `bool[]`.
        loss: Sum of the losses of its inner steps, `float32[]`.
        grad_norm: Sum of the norms of their gradients, `float32[]`.
        steps: Number of these steps, `int32[]`.
        kept: Sum of the squares of what it has not sent, `float32[]`.
        model_state: Its model state.
    """

    valid: Array
    loss: Scalar
    grad_norm: Scalar
    steps: Array
    kept: Scalar
    model_state: PyTree


def outer_step(
    loss_fn: Callable[..., Any],
    tx: Transform,
    outer: OuterOptimizer,
    axes: tuple[str, ...] | None,
    replicas: int,
    accumulate: int,
    synchronise: bool,
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
        synchronise: Whether a round ends with this step.
        state: With one row in the local state.
        batch: Of this replica.

    Returns:
        The new state and the report.
    """
    own = row_of(state.opt_state.local)
    inner = Replicas(axes[1:] or None) if axes else Replicas(None)
    rank = Replicas(axes).rank
    found = gradient(
        loss_fn,
        own.params,
        own.model_state,
        batch,
        fold_all(state.key, state.step, rank),
        accumulate,
    )
    own = _after_inner_step(tx, own, found, inner)
    params, model_state, outer_state = state.params, state.model_state, state.opt_state
    sent, density, left_out = 0.0, 0.0, jnp.int32(0)
    if synchronise:
        axis = axes[0] if axes else None
        before = outer_state.report.left_out
        params, model_state, outer_state, own, header_words = _round(outer, state, own, axis)
        left_out = outer_state.report.left_out - before
        sent = bytes_of_round(outer, params, header_words, replicas)
        size = sum(x.size for x in jax.tree.leaves(params))
        density = outer.entries_sent(params) / max(size, 1)
    report = outer_state.report
    info = StepInfo(
        loss=report.loss,
        aux=as_rows(found.aux),
        grad_norm=report.grad_norm,
        density=jnp.float32(density),
        bytes_sent=jnp.float32(sent),
        skipped=left_out == replicas,
        bytes_received=jnp.float32(sent),
        norm_kept=report.norm_kept,
        synchronised=jnp.bool_(synchronise),
        losses=found.loss.astype(jnp.float32)[None],
        left_out=left_out,
    )
    outer_state = outer_state._replace(local=as_rows(own))
    return TrainState(state.step + 1, params, model_state, outer_state, state.key), info


def bytes_of_round(outer: OuterOptimizer, params: Any, header_words: int, replicas: int) -> float:
    """Return the bytes that one replica sends in a round, in ring algorithms."""
    words = outer.message_words(params)
    if outer.collective == "all_reduce":
        dense = ring_all_reduce_bytes(words, replicas)
        return dense + 4.0 * header_words * (replicas - 1)
    return 4.0 * (words + header_words) * (replicas - 1)


def _after_inner_step(
    tx: Transform, own: LocalState, found: Gradient, inner: Replicas
) -> LocalState:
    """Return what a replica has after a step of its own; one that is not finite changes nothing."""
    grads, loss = inner.mean((found.grads, found.loss.astype(jnp.float32)))
    model_state = jax.tree.map(inner.shared, found.model_state) if inner.axis else found.model_state
    updates, opt_state = tx.update(grads, own.opt_state, own.params)
    new = optax.apply_updates(own.params, updates), model_state, opt_state
    norm = inner.mean(norm_of(found.grads))
    # The parameters, not the gradients: the user's chain may repair a gradient.
    good = jnp.isfinite(loss) & _all_finite(new[0]) & _stays_finite(own.model_state, model_state)
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
        steps=own.steps + good.astype(jnp.int32),
        failed=own.failed + (~good).astype(jnp.int32),
    )


def _round(
    outer: OuterOptimizer, state: TrainState, own: LocalState, axis: str | None
) -> tuple[PyTree, PyTree, OuterState, LocalState, int]:
    """Exchange what all replicas changed.

    Returns:
        Shared parameters, shared model state, the outer state (its rows are stale), what this
        replica has of its own, and the words of a header.
    """
    difference = jax.tree.map(_difference, state.params, own.params)
    valid = (own.failed == 0) & _all_finite(difference)
    difference = jax.tree.map(lambda x: jnp.where(valid, x, 0.0), difference)
    encoded = outer.encode(difference, own.outer)
    local = jax.tree.map(lambda new, old: jnp.where(valid, new, old), encoded.local, own.outer)
    header = Header(
        valid, own.loss, own.grad_norm, own.steps, jnp.float32(encoded.kept), own.model_state
    )
    words = to_words(header)
    if outer.collective == "all_reduce":
        rows = _gathered(words, axis)
        message = jnp.where(valid, encoded.message, 0.0)
        messages = message if axis is None else lax.psum(message, axis)
    else:
        rows = _gathered(jnp.concatenate([words, encoded.message]), axis)
        rows, messages = rows[:, : words.size], rows[:, words.size :]
    headers = from_words(rows, header)
    params, shared, model_state = _decoded(outer, state, messages, headers)
    report = _report(headers, state.opt_state.report)
    outer_state = OuterState(state.opt_state.rounds + 1, shared, report, state.opt_state.local)
    zero, none = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
    own = LocalState(params, model_state, own.opt_state, local, zero, zero, none, none)
    return params, model_state, outer_state, own, words.size


def _decoded(
    outer: OuterOptimizer, state: TrainState, messages: Array, headers: Header
) -> tuple[PyTree, PyTree, PyTree]:
    """Return shared parameters, outer state and model state; the old ones if no replica is valid.

    Every replica computes them from the same gathered words in the same order, bit for bit.
    """
    old = state.params, state.opt_state.shared, state.model_state
    params, shared = outer.decode(state.params, state.opt_state.shared, messages, headers.valid)
    mean = lambda rows, like: _mean_of_rows(rows, headers.valid, like)  # noqa: E731
    model_state = jax.tree.map(mean, headers.model_state, state.model_state)
    some = headers.valid.any()
    new = params, shared, model_state
    return jax.tree.map(lambda new, old: jnp.where(some, new, old), new, old)


def _mean_of_rows(rows: Array, valid: Array, like: Array) -> Array:
    """Return the mean of the valid rows of floats, and the first valid row of all else."""
    first = rows[jnp.argmax(valid)]
    if is_typed_key(rows) or not jnp.issubdtype(rows.dtype, jnp.inexact):
        return first
    wide = rows.astype(jnp.promote_types(rows.dtype, jnp.float32))
    mask = valid.reshape(-1, *(1 for _ in jnp.shape(like)))
    total = jnp.where(mask, wide, 0).sum(0)
    return (total / jnp.maximum(valid.sum(), 1)).astype(rows.dtype)


def _report(headers: Header, before: RoundReport) -> RoundReport:
    """Return what is known of a round from the headers of all replicas."""
    steps = jnp.where(headers.valid, headers.steps, 0).sum()
    mean = lambda sums: jnp.where(headers.valid, sums, 0.0).sum() / steps  # noqa: E731
    left_out = (~headers.valid).sum().astype(jnp.int32)
    return RoundReport(
        mean(headers.loss),
        mean(headers.grad_norm),
        jnp.sqrt(jnp.where(headers.valid, headers.kept, 0.0).sum()),
        before.left_out + left_out,
    )


def _gathered(words: Array, axis: str | None) -> Array:
    return words[None] if axis is None else lax.all_gather(words, axis, to="invarying")


def _difference(shared: Array, own: Array) -> Array:
    """Return shared parameters less a replica's own, float32, computed in no fewer bits."""
    wide = jnp.promote_types(shared.dtype, jnp.float32)
    return (shared.astype(wide) - own.astype(wide)).astype(jnp.float32)


def _stays_finite(old: PyTree, new: PyTree) -> Array:
    """Whether no float of a model state became infinite or NaN that was neither."""
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    floats = ((x, y) for x, y in pairs if jnp.issubdtype(x.dtype, jnp.inexact))
    return jnp.stack(
        [(jnp.isfinite(y) | ~jnp.isfinite(x)).all() for x, y in floats] or [True]
    ).all()


def _all_finite(tree: PyTree) -> Array:
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)] or [True]).all()
