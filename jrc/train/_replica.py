"""One step of one replica: gradient, exchange, update and report."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jrc._ring import ring_all_reduce_bytes
from jrc._rng import fold_all
from jrc._text import brief
from jrc._tree import all_finite, is_typed_key
from jrc._typing import Array, PyTree, Scalar, Transform
from jrc.dgc import DGCState, apply_gradients
from jrc.dgc._internal import applies_in_place, dgc_states, served
from jrc.train._extra_args import (
    check_same_state,
    differentiated,
    of_the_loss,
    takes_extra_arguments,
    update,
)
from jrc.train._gradient import gradient, mean_loss, mean_or_sum
from jrc.train._split import Split
from jrc.train._state import TrainState


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
            gradient was not finite (only with a `DGCState`).
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
    tx: Transform,
    axes: tuple[str, ...] | None,
    replicas: int,
    accumulate: int,
    state: TrainState,
    batch: PyTree,
    *,
    split: Split | None = None,
) -> tuple[TrainState, StepInfo]:
    """Return the state after one step of one replica, and its report.

    `split` says how the replica itself is split by XLA, if it is.
    """
    over = Replicas(axes)
    key = fold_all(state.key, state.step, over.rank)
    given = state.model_state, batch, key, accumulate, split is not None
    local = gradient(loss_fn, differentiated(state.params), *given)
    compression = dgc_states(state.opt_state)
    own = served(local.grads, compression)
    grads = jax.tree.map(lambda g, own: g if own else over.mean(g), local.grads, own)
    if any(isinstance(node, optax.MultiStepsState) for node in _accumulating(state.opt_state)):
        grads = jax.tree.map(lambda g, own: over.storable(g) if own else g, grads, own)
    extra = {"value": over.mean(local.loss)} if takes_extra_arguments(tx) else {}
    if not compression:
        loss_of = lambda params: mean_loss(loss_fn, params, *given)  # noqa: E731
        extra |= of_the_loss(grads, state.params, loss_of, over.mean)
    params, opt_state, skipped = _updated(tx, state, grads, over, split, extra)
    model_state = jax.tree.map(over.shared, local.model_state)
    if compression:
        model_state = _unless(skipped, state.model_state, model_state)
    density, sent = _sent(compression, opt_state, skipped)
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(own), strict=True)
    if split is None:
        dense = sum(g.size * g.dtype.itemsize for g, alone in pairs if not alone)
        sent += ring_all_reduce_bytes(dense, replicas, itemsize=1)
    else:
        sent += split.bytes_of([g if not alone else None for g, alone in pairs])
    # One reduction for three scalars; the sum over replicas is their mean times their number.
    unsent = optax.tree.norm([state.v for state in dgc_states(opt_state)], squared=True)
    loss, norm, kept = over.mean((local.loss, norm_of(local.grads), jnp.float32(unsent)))
    aux = jax.tree.map(lambda x: mean_or_sum(jnp.asarray(x), over.mean, over.total), local.aux)
    kept = jnp.sqrt(kept * (1 if axes is None else jax.lax.axis_size(axes[0])))
    exchanged = jnp.bool_(True), None, jnp.int32(0)
    info = StepInfo(loss, aux, norm, density, sent, skipped, sent, kept, *exchanged)
    return TrainState(state.step + 1, params, model_state, opt_state, state.key), info


def _updated(
    tx: Transform,
    state: TrainState,
    grads: PyTree,
    over: "Replicas",
    split: Split | None,
    extra: dict[str, Any],
) -> tuple[PyTree, PyTree, Array]:
    """Return parameters and optimizer state after the update, and whether it was skipped."""
    specs = {} if split is None else {"param_specs": split.specs}
    if applies_in_place(tx):
        # It skips by itself, and writes only the parameter entries that were sent.
        params, opt_state = apply_gradients(tx, grads, state.opt_state, state.params, **specs)
        ((old,), (new,)) = dgc_states(state.opt_state), dgc_states(opt_state)
        return params, opt_state, new.skipped != old.skipped
    if not dgc_states(state.opt_state):
        updates, opt_state = update(tx, grads, state.opt_state, state.params, extra)
        if over.axis is not None:
            check_same_state(state.opt_state, opt_state)
        return optax.apply_updates(state.params, updates), opt_state, jnp.zeros((), bool)
    # Computed before the update, so that the whole chain skips the step, and over all replicas, so
    # that all take the same branch: there are collectives in it.
    skipped = over.total((~all_finite(grads)).astype(jnp.int32)) > 0

    def skip() -> tuple[PyTree, PyTree]:
        return state.params, _count_skipped(state.opt_state)

    def step() -> tuple[PyTree, PyTree]:
        updates, opt_state = update(tx, grads, state.opt_state, state.params, extra | specs)
        return optax.apply_updates(state.params, updates), opt_state

    params, opt_state = jax.lax.cond(skipped, skip, step)
    return params, opt_state, skipped


def _count_skipped(opt_state: PyTree) -> PyTree:
    """Return the optimizer's state with one more skipped step in each compression."""
    compression = lambda node: isinstance(node, DGCState)  # noqa: E731
    return jax.tree.map(
        lambda node: (
            node._replace(skipped=optax.safe_increment(node.skipped)) if compression(node) else node
        ),
        opt_state,
        is_leaf=compression,
    )


def _unless(skipped: Array, old: PyTree, new: PyTree) -> PyTree:
    """Return the new tree, or the old one if the step was skipped."""
    return jax.tree.map(lambda x, y: jnp.where(skipped, x, y), old, new)


def _accumulating(opt_state: PyTree) -> list[Any]:
    """Return the states of `optax.MultiSteps` around a compression, and all other leaves."""

    def accumulates(node: Any) -> bool:
        return isinstance(node, optax.MultiStepsState) and bool(dgc_states(node.inner_opt_state))

    return jax.tree.leaves(opt_state, is_leaf=accumulates)


class Replicas:
    """Reductions over the replica axes of a step; without an axis, a single replica."""

    def __init__(self, axis: tuple[str, ...] | None) -> None:
        self.axis = axis
        self.rank = jnp.int32(0) if axis is None else jax.lax.axis_index(axis)

    def mean(self, x: Any) -> Any:
        return x if self.axis is None else jax.lax.pmean(x, self.axis)

    def total(self, x: Any) -> Any:
        return x if self.axis is None else jax.lax.psum(x, self.axis)

    def storable(self, x: Any) -> Any:
        """Reduce a gradient so that it is equal where the state that accumulates it is shared."""
        if self.axis is None:
            return x
        if not jnp.ndim(x):
            return self.mean(x)
        return jax.lax.pmean(x, self.axis[1:]) if len(self.axis) > 1 else x

    def shared(self, x: Array) -> Array:
        """Return one value for all: the mean of floats, replica 0's integers, bools and keys."""
        if is_typed_key(x):
            data = self.shared(jax.random.key_data(x))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return self.mean(x)
        first = jnp.where(self.rank == 0, x, jnp.zeros_like(x))
        return self.total(first.astype(jnp.int32) if x.dtype == bool else first).astype(x.dtype)


def norm_of(grads: PyTree) -> Array:
    """Return the L2 norm of a gradient, in float32: squares in half precision overflow."""
    return optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))


def _sent(old: list[DGCState], opt_state: PyTree, skipped: Array) -> tuple[jax.Array, jax.Array]:
    """Return density and bytes of all compressions; one that did not act sent nothing."""
    density, sent, entries = jnp.zeros(()), jnp.zeros(()), 0
    for before, after in zip(old, dgc_states(opt_state), strict=True):
        size = sum(v.size for v in jax.tree.leaves(after.v))
        acted = skipped | (after.step != before.step)
        sent += jnp.where(acted, after.bytes_sent, 0.0)
        density += size * after.density
        entries += size
    return (density / entries if entries else jnp.ones(())), sent
