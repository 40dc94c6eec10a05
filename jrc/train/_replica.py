"""One step of one replica: gradient, exchange, update and report."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrc._layout import Layout
from jrc._rng import fold_all
from jrc._text import brief
from jrc._typing import Array, PyTree, Scalar
from jrc.outer_optimizers._internal import as_rows
from jrc.train._loss import Objective, mean_or_sum
from jrc.train._state import TrainState
from jrc.train._synchronisation import Replicas, Synchronisation, Traffic, norm_of


class StepInfo(NamedTuple):
    """The report of one step: scalars, equal on every replica.

    With `outer=` an inner step exchanges nothing. `loss`, `grad_norm` and `norm_kept` are then
    those of the last round, of whichever fragment, means over its inner steps (NaN and 0 before the
    first), and `losses` and `aux` are returned as they are, not reduced, with a leading axis of
    this process's replicas.

    Attributes:
        loss: Mean loss over all replicas.
        aux: The other results of the loss function: floating leaves averaged, counts (integers
            and booleans) added over parts and replicas.
        grad_norm: Mean over replicas of the L2 norm of the local gradient.
        density: Share of the compressed entries that was sent; 1 without compression.
        bytes_sent: Bytes that each device sent for gradients over the axes of the step.
        skipped: Whether parameters, optimizer and model state were left unchanged because a
            gradient was not finite (with a `DGCState`, or in a round).
        bytes_received: Bytes that each device received for gradients: in ring algorithms as many
            as it sent.
        norm_kept: L2 norm of the residual gradients of all replicas after the step; 0 without
            compression.
        synchronised: Whether the replicas exchanged something in this step.
        losses: With `outer=` the loss of each replica of this process in this step,
            `float32[replicas]`; else `None`.
        left_out: Replicas whose contribution to this round was left out, because something was
            not finite.
    """

    loss: Scalar
    aux: PyTree
    grad_norm: Scalar
    density: Scalar
    bytes_sent: Scalar
    skipped: Array
    bytes_received: Scalar
    norm_kept: Scalar
    synchronised: Array
    losses: Array | None
    left_out: Array

    def __repr__(self) -> str:
        return brief(self)


def replica_step(
    loss_fn: Callable[..., Any],
    accumulate: int,
    is_mapped: bool,
    way: Synchronisation,
    program: Hashable,
    layout: Layout,
    state: TrainState,
    batch: PyTree,
) -> tuple[TrainState, StepInfo]:
    """Return the state after one step of one replica, and its report.

    Args:
        loss_fn: The loss function.
        accumulate: Parts of a batch.
        is_mapped: Whether there are replicas: the axes of the step are bound.
        way: How replicas agree.
        program: Which of its programs this is.
        layout: How XLA splits a replica; its `params` are `None` if it does not.
        state: The state, with rows of this replica.
        batch: That of this replica.
    """
    over = Replicas(layout, layout.names, is_mapped)
    key = fold_all(state.key, state.step, over.rank)
    objective = Objective(loss_fn, batch, key, accumulate, layout.params is not None)
    after, traffic = way.step(program, state, objective, over)
    return after._replace(step=state.step + 1), _report(traffic, over)


def _report(traffic: Traffic, over: Replicas) -> StepInfo:
    """Return the report of a step: means over the replicas, or what the last round has told."""
    found, last, sent = traffic.gradient, traffic.round, jnp.float32(traffic.bytes_sent)
    losses = None
    if last is None:
        # One reduction for three scalars; the sum over replicas is their mean times their number.
        scalars = found.loss, norm_of(found.grads), jnp.float32(traffic.unsent)
        loss, norm, unsent = over.mean(scalars)
        kept = jnp.sqrt(unsent * over.rows)
        reduced = lambda x: mean_or_sum(jnp.asarray(x), over.mean, over.total)  # noqa: E731
        aux = jax.tree.map(reduced, found.aux)
    else:
        loss, norm, kept = last.loss, last.grad_norm, last.norm_kept
        aux, losses = as_rows(found.aux), found.loss.astype(jnp.float32)[None]
    return StepInfo(
        loss=loss,
        aux=aux,
        grad_norm=norm,
        density=jnp.float32(traffic.density),
        bytes_sent=sent,
        skipped=jnp.asarray(traffic.skipped),
        bytes_received=sent,
        norm_kept=kept,
        synchronised=jnp.bool_(traffic.synchronised),
        losses=losses,
        left_out=jnp.int32(traffic.left_out),
    )
