"""What a way to synchronise replicas is: when they exchange something, and what.

`WAYS` in `jrc.train._synchronisation` lists all of them.
"""

import abc
import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, NamedTuple

from jax.sharding import PartitionSpec

from jrc._layout import Layout
from jrc._tree import plain
from jrc._typing import Array, PyTree, Real, Scalar, Transform
from jrc.outer_optimizers import OuterOptimizer, RoundReport
from jrc.train._loss import Gradient, Objective
from jrc.train._state import TrainState
from jrc.train._synchronisation.replicas import Replicas


class Traffic(NamedTuple):
    """What a device has sent in a step, and what came of it.

    Attributes:
        gradient: That of this replica.
        bytes_sent: Bytes over the axes of the step, of the collectives that ran.
        density: Share of the entries that was sent.
        skipped: Whether nothing was changed, because something was not finite, `bool[]`.
        unsent: Sum of squares of what this replica has not sent.
        synchronised: Whether the replicas exchanged something.
        left_out: Replicas whose contribution was left out, `int32[]`.
        round: What all replicas know of the last round. With it loss and aux of the step are not
            reduced; `None` reduces them.
    """

    gradient: Gradient
    bytes_sent: Scalar | Real
    density: Scalar | Real = 1.0
    skipped: Array | bool = False
    unsent: Scalar | Real = 0.0
    synchronised: bool = True
    left_out: Array | int = 0
    round: RoundReport | None = None


@dataclasses.dataclass(frozen=True)
class Synchronisation(abc.ABC):
    """When and how replicas agree: a frozen value, the same for `init_state` and the step.

    What is not abstract is that of a way that exchanges gradients in each step.

    Attributes:
        tx: The optimizer.
        reports_rows: Whether losses and aux are returned as they are on each replica.
        options: The names of the options of `TrainStep.lower`.
        made_by: The call that makes its state, for errors.
    """

    tx: Transform

    reports_rows: ClassVar[bool] = False
    options: ClassVar[tuple[str, ...]] = ()
    made_by: ClassVar[str] = "jrc.init_state(params, tx, key)"

    @property
    def made_for(self) -> str:
        """What a state must be built for, for errors."""
        return "the optimizer tx"

    @classmethod
    @abc.abstractmethod
    def of(
        cls, tx: Transform, outer: OuterOptimizer | None, opt_state: PyTree
    ) -> "Synchronisation | None":
        """Return the value for these optimizers, `None` if they synchronise in another way."""

    def check(self, params: PyTree, model_state: PyTree, opt_state: PyTree, layout: Layout) -> None:
        """Raise if arrays or optimizers cannot be synchronised so; `opt_state` is that of `tx`."""
        del params, model_state, opt_state, layout

    def init(
        self,
        params: PyTree,
        model_state: PyTree,
        opt_state: PyTree,
        layout: Layout,
        shapes: bool = False,
    ) -> PyTree:
        """Return the `opt_state` of a train state from that of `tx`, with one row for one replica.

        Args:
            params: The parameters, or their shapes with shardings.
            model_state: The model state, likewise.
            opt_state: The first state of `tx`.
            layout: The layout of the run.
            shapes: Whether shapes will do.
        """
        del params, model_state, layout, shapes
        return opt_state

    @abc.abstractmethod
    def opt_specs(self, state: TrainState, layout: Layout) -> PyTree:
        """Return how the `opt_state` lies on the mesh: a `PartitionSpec` for each leaf.

        Args:
            state: The train state or its shapes.
            layout: The layout, with the specs of the state's parameters.
        """

    def specs(self, state: TrainState, layout: Layout) -> TrainState:
        """Return how a state lies on the mesh: a `PartitionSpec` for each leaf."""
        whole: Any = PartitionSpec()
        model_state = layout.specs(state.model_state, "model_state")
        opt_state = self.opt_specs(state, layout)
        return TrainState(whole, layout.params, model_state, opt_state, whole)

    def row_specs(self, state: TrainState, layout: Layout) -> TrainState:
        """Return the specs of a state over the replicas: rows are split, all else is whole."""
        shapes = plain(state)
        return self.specs(shapes, layout.of_single_devices().with_params(shapes.params))

    def program(self, number: Callable[[], int]) -> Hashable:
        """Return which program runs in a step, of whose collectives none is in the others.

        Args:
            number: Returns the number of the step, from 1 on; it may wait for the device.
        """
        del number
        return ()

    def lowered(self, closing: bool = True, number: int | None = None) -> Hashable:
        """Return the program that `lower` shows: that which needs most memory.

        Args:
            closing: Whether it may exchange something; of the names in `options`, as the next.
            number: The number of the step, whatever it does.
        """
        del closing, number
        return ()

    @abc.abstractmethod
    def step(
        self, program: Any, state: TrainState, objective: Objective, over: Replicas
    ) -> tuple[TrainState, Traffic]:
        """Return the state after a step of one replica, and what was sent for it.

        Args:
            program: Which one is traced.
            state: Of this replica, with one row.
            objective: The loss over this replica's batch, and its gradient.
            over: The reductions over the replicas. The `params` of its layout are `None` where a
                replica is one device.
        """
