"""The mean of gradients in every step, for any optax transform."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from jrc._layout import Layout
from jrc._typing import PyTree, Transform
from jrc.outer_optimizers import OuterOptimizer
from jrc.train._loss import Objective
from jrc.train._optax import check_same_state, differentiated, of_the_loss, update
from jrc.train._state import TrainState
from jrc.train._synchronisation.protocol import Synchronisation, Traffic
from jrc.train._synchronisation.replicas import Replicas


@dataclasses.dataclass(frozen=True)
class EachStep:
    """What every way has that exchanges gradients in each step.

    Attributes:
        tx: The optimizer.
    """

    tx: Transform

    made_for = "the optimizer tx"
    reports_rows = False
    options = ()

    def check(self, params: PyTree, model_state: PyTree, opt_state: PyTree, layout: Layout) -> None:
        del params, model_state, opt_state, layout

    def init(
        self,
        params: PyTree,
        model_state: PyTree,
        opt_state: PyTree,
        layout: Layout,
        shapes: bool = False,
    ) -> PyTree:
        del params, model_state, layout, shapes
        return opt_state

    def program(self, number: Callable[[], int]) -> tuple[()]:
        del number
        return ()

    def lowered(self, closing: bool = True, number: int | None = None) -> tuple[()]:
        del closing, number
        return ()


class MeanGradients(EachStep):
    """Replicas average their gradients, and every one of them takes the same step."""

    @classmethod
    def of(cls, tx: Transform, outer: OuterOptimizer | None, opt_state: PyTree) -> Synchronisation:
        """Return the value for any transform."""
        del outer, opt_state
        return cls(tx)

    def specs(self, state: TrainState, layout: Layout) -> TrainState:
        """Return how a state lies: the arrays that the optimizer has for a parameter as it does."""
        own = dataclasses.replace(layout, params=differentiated(layout.params))
        opt_state = own.like_params(state.opt_state, differentiated(state.params))
        return specs_with(opt_state, state, layout)

    def step(
        self, program: Any, state: TrainState, objective: Objective, over: Replicas, layout: Layout
    ) -> tuple[TrainState, Traffic]:
        """Return the state after the step of the whole batch."""
        del program, layout
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


def specs_with(opt_state: PyTree, state: TrainState, layout: Layout) -> TrainState:
    """Return the specs of a state from those of its `opt_state`."""
    model_state, whole = layout.specs(state.model_state, "model_state"), PartitionSpec()
    return TrainState(whole, layout.params, model_state, opt_state, whole)  # type: ignore[arg-type]
