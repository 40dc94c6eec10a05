"""The mean of gradients in every step, for any optax transform."""

import dataclasses
from typing import Any

import jax
import optax

from jrc._layout import Layout
from jrc._typing import PyTree, Transform
from jrc.outer_optimizers import OuterOptimizer
from jrc.train._loss import Objective
from jrc.train._optax import check_same_state, differentiated, of_the_loss, update
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
        found = objective.gradient(differentiated(state.params), state.model_state)
        grads = over.mean(found.grads)
        loss_of = lambda params: objective.loss(params, state.model_state)  # noqa: E731
        extra = {"value": over.mean(found.loss)}
        extra |= of_the_loss(grads, state.params, loss_of, over.mean)
        updates, opt_state = update(self.tx, grads, state.opt_state, state.params, extra)
        if over.axis is not None:
            check_same_state(state.opt_state, opt_state)
        state = state._replace(
            params=optax.apply_updates(state.params, updates),
            model_state=jax.tree.map(over.shared, found.model_state),
            opt_state=opt_state,
        )
        return state, Traffic(found, over.bytes_of_mean(grads))
