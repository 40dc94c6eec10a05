"""The mean of gradients in every step, for any optax transform."""

import dataclasses
from typing import Any

import jax
import optax

from jrc._layout import Layout
from jrc._tree import sum_dtype
from jrc._typing import PyTree, Scalar, Transform
from jrc.outer_optimizers import LocalState, OuterOptimizer
from jrc.train._loss import Gradient, Objective
from jrc.train._optax import differentiated, of_the_loss, update
from jrc.train._state import TrainState
from jrc.train._synchronisation.protocol import Synchronisation, Traffic
from jrc.train._synchronisation.replicas import Replicas


class MeanGradients(Synchronisation):
    """Replicas average their gradients, and every one of them takes the same step."""

    @classmethod
    def of(cls, tx: Transform, outer: OuterOptimizer | None, opt_state: PyTree) -> Synchronisation:
        """Return the value for any transform."""
        del outer, opt_state
        return cls(tx)

    def opt_specs(self, state: TrainState, layout: Layout) -> PyTree:
        """Return how its state lies: arrays that it has for a parameter as the parameter does."""
        own = dataclasses.replace(layout, params=differentiated(layout.params))
        return own.like_params(state.opt_state, differentiated(state.params))

    def step(
        self, program: Any, state: TrainState, objective: Objective, over: Replicas
    ) -> tuple[TrainState, Traffic]:
        """Return the state after the step of the whole batch."""
        del program
        state, found, _ = mean_step(self.tx, state, objective, over)
        return state, Traffic(found, over.bytes_of_mean(found.grads))


def mean_step[State: (TrainState, LocalState)](
    tx: Transform, before: State, objective: Objective, over: Replicas
) -> tuple[State, Gradient, Scalar]:
    """Take the step of the mean gradient, which is the same on all replicas.

    Args:
        tx: The optimizer.
        before: A state whose parameters, model state and optimizer state are equal on them.
        objective: The loss over the batch of this replica.
        over: The reductions.

    Returns:
        The state after the step, the gradient of this replica, and the mean loss, at least float32.
    """
    found = objective.gradient(differentiated(before.params), before.model_state)
    wide = found.loss.astype(sum_dtype(found.loss.dtype))
    grads, loss = over.mean((found.grads, wide))
    loss_of = lambda params: objective.loss(params, before.model_state)  # noqa: E731
    extra = {"value": loss.astype(found.loss.dtype)}
    extra |= of_the_loss(grads, before.params, loss_of, over.mean)
    updates, opt_state = update(tx, grads, before.opt_state, before.params, extra)
    after = before._replace(
        params=optax.apply_updates(before.params, updates),
        model_state=jax.tree.map(over.shared, found.model_state),
        opt_state=opt_state,
    )
    return after, found, loss
