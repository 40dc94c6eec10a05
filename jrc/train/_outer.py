"""One step of one replica with an outer optimizer: a local step, and a round at its end.

A few programs are compiled. The inner step has no collective between replicas; the step that ends a
round has one all-gather (an all-reduce and a small all-gather for dense messages), and with several
fragments there is one such step for each. Which one runs is known on the host from the number of
the step, so that none holds the others' collectives.

A replica may be split over several devices. XLA splits the inner step; the round is one of shards
(`_inside.py`).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from jrc._rng import fold_all
from jrc._tree import all_finite
from jrc._typing import Array, PyTree, Scalar, Transform
from jrc.outer_optimizers import LocalState, OuterOptimizer
from jrc.outer_optimizers._internal import (
    Fragment,
    Packet,
    Turn,
    as_rows,
    bytes_of_exchange,
    cut_to,
    fragment_count,
    header_words,
    padded,
    row_of,
)
from jrc.train._exchange import Arrived, applied, exchanged, packed
from jrc.train._extra_args import check_same_state, differentiated, of_the_loss, update
from jrc.train._gradient import Gradient, gradient, mean_loss
from jrc.train._inside import Inside, in_exchange, inside_of, without_local
from jrc.train._replica import Replicas, StepInfo, norm_of
from jrc.train._split import Split
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
    *,
    split: Split | None = None,
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
        split: How the replica itself is split by XLA, if it is.

    Returns:
        The new state and the report.
    """
    # Without barriers XLA's CPU compiler makes the rows' reshapes part of its fusions, which then
    # copy every leaf and cannot write it in place.
    own = lax.optimization_barrier(row_of(state.opt_state.local))
    inner = Replicas(axes[1:] or None) if axes else Replicas(None)
    rounds = _Round(outer, inside_of(split), axes[0] if axes else None)
    key = fold_all(state.key, state.step, Replicas(axes).rank)
    given = own.model_state, batch, key, accumulate, split is not None
    loss_of = lambda params: mean_loss(loss_fn, params, *given)  # noqa: E731
    before, flight, arrived = state, own.in_flight, None
    if flight is not None:
        # Nothing below depends on it until the inner step is done.
        arrived = rounds.landed(turn.receives, state, own, flight)
    found = gradient(loss_fn, differentiated(own.params), *given)
    own = _after_inner_step(tx, own, found, inner, loss_of, fragment_count(outer))
    if flight is None:
        packet, own = rounds.made(turn.sends, state, own)
        arrived = rounds.landed(turn.receives, state, own, packet)
    state, own = rounds.after(turn.receives, state, own, arrived)
    if flight is not None:
        packet, own = rounds.made(turn.sends, state, own)
        own = own._replace(in_flight=rounds.waiting(packet, flight))
    info = _info(rounds, turn, replicas, before, state, found)
    outer_state = state.opt_state._replace(local=as_rows(lax.optimization_barrier(own)))
    state = TrainState(before.step + 1, state.params, state.model_state, outer_state, state.key)
    return state, info


class _Round(NamedTuple):
    """The parts of a round, each on the shards of a device.

    Attributes:
        outer: The outer optimizer.
        inside: How a replica is split.
        axis: The axis of the replicas.
    """

    outer: OuterOptimizer
    inside: Inside
    axis: str | None

    @property
    def packets(self) -> Any:
        """Return the specs of a packet: each device has one of its own."""
        each: Any = PartitionSpec(self.inside.axes)
        return Packet(each, each)

    @property
    def arrivals(self) -> Any:
        """Return the specs of what arrives: rows for all replicas, or one sum."""
        rows: Any = PartitionSpec(None, self.inside.axes)
        one: Any = PartitionSpec(self.inside.axes)
        whole: Any = PartitionSpec()
        return Arrived(rows, one if self.outer.collective == "all_reduce" else rows, whole)

    def fragment(self, index: int, params: PyTree) -> Fragment:
        """Return a fragment of the parameters."""
        return self.inside.fragments(params, fragment_count(self.outer))[index]

    def words(self, index: int, state: TrainState) -> tuple[int, PyTree]:
        """Return the words of a fragment's header, and the shapes of a device's part of it."""
        part = self.fragment(index, state.params).shapes(self.inside.shapes(state, "params"))
        model_state = self.inside.shapes(state, "model_state")
        return header_words(self.outer, index, model_state), part

    def made(
        self, index: int | None, state: TrainState, own: LocalState
    ) -> tuple[Packet | None, LocalState]:
        """Return the packet of a fragment, if there is one to send, and what the replica keeps."""
        if index is None:
            return None, own
        fragment = self.fragment(index, state.params)
        run = functools.partial(packed, self.outer, fragment, index, self.inside)
        specs = self.inside.own
        run = self.inside.run(run, (self.inside.params, specs), (self.packets, specs))
        packet, new = run(state.params, in_exchange(own))
        return packet, _joined(new, own)

    def landed(
        self, index: int | None, state: TrainState, own: LocalState, packet: Packet | None
    ) -> Arrived | None:
        """Exchange a packet, which may be longer than what it has, if there is one to receive."""
        if index is None or packet is None:
            return None
        header, part = self.words(index, state)
        message = self.outer.message_words(part)

        def run(packet: Packet, model_state: PyTree) -> Arrived:
            own = cut_to(packet, header, message)
            return exchanged(self.outer, index, self.axis, own, model_state)

        specs = self.packets, self.inside.model_state
        return self.inside.run(run, specs, self.arrivals)(packet, own.model_state)

    def after(
        self, index: int | None, state: TrainState, own: LocalState, arrived: Arrived | None
    ) -> tuple[TrainState, LocalState]:
        """Return what is shared and what a replica has after an exchange, if there was one."""
        if index is None or arrived is None:
            return state, own
        fragment, inside = self.fragment(index, state.params), self.inside
        run = functools.partial(applied, self.outer, fragment, index)
        specs = inside.shared, inside.own
        run = inside.run(run, (*specs, self.arrivals), specs)
        state, new = run(without_local(state), in_exchange(own), arrived)
        return state, _joined(new, own)

    def waiting(self, packet: Packet | None, longest: Packet) -> Packet:
        """Return a packet as long as the longest one; zeros for none."""
        if packet is None:
            return jax.tree.map(jnp.zeros_like, longest)
        specs = self.packets
        return self.inside.run(padded, (specs, specs), specs)(packet, longest)


def _joined(new: LocalState, own: LocalState) -> LocalState:
    """Return what a replica has after an exchange, with what the exchange has not read."""
    return new._replace(opt_state=own.opt_state, in_flight=own.in_flight)


def _info(
    rounds: _Round,
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
        words, part = rounds.words(turn.receives, after)
        sent = bytes_of_exchange(rounds.outer, part, words, replicas)
        size = sum(x.size for x in jax.tree.leaves(rounds.inside.shapes(after, "params")))
        density = rounds.outer.entries_sent(part) / max(size, 1)
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
    loss_of: Callable[[PyTree], Scalar],
    fragments: int,
) -> LocalState:
    """Return what a replica has after a step of its own; one that is not finite changes nothing."""
    grads, loss = inner.mean((found.grads, found.loss.astype(jnp.float32)))
    extra = {"value": loss.astype(found.loss.dtype)}
    extra |= of_the_loss(grads, own.params, loss_of, inner.mean)
    model_state = jax.tree.map(inner.shared, found.model_state) if inner.axis else found.model_state
    updates, opt_state = update(tx, grads, own.opt_state, own.params, extra)
    check_same_state(own.opt_state, opt_state)
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
