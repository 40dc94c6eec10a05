"""What a way to synchronise replicas is: when they exchange something, and what.

`WAYS` in `jrc.train._synchronisation` lists all of them.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jrc._layout import Layout
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


@runtime_checkable
class Synchronisation(Protocol):
    """When and how replicas agree: a frozen value, the same for `init_state` and the step."""

    @property
    def made_for(self) -> str:
        """What a state must be built for, for errors."""
        ...

    @property
    def reports_rows(self) -> bool:
        """Whether losses and aux are returned as they are on each replica."""
        ...

    @property
    def options(self) -> tuple[str, ...]:
        """The names of the options of `TrainStep.lower`."""
        ...

    @classmethod
    def of(
        cls, tx: Transform, outer: OuterOptimizer | None, opt_state: PyTree
    ) -> "Synchronisation | None":
        """Return the value for these optimizers, `None` if they synchronise in another way."""

    def check(self, params: PyTree, model_state: PyTree, opt_state: PyTree, layout: Layout) -> None:
        """Raise if arrays or optimizers cannot be synchronised so; `opt_state` is that of `tx`."""

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
        ...

    def specs(self, state: TrainState, layout: Layout) -> TrainState:
        """Return how a state lies on the mesh: a `PartitionSpec` for each leaf.

        Args:
            state: The state or its shapes.
            layout: The layout, with the specs of the state's parameters.
        """
        ...

    def program(self, number: Callable[[], int]) -> Hashable:
        """Return which program runs in a step, of whose collectives none is in the others.

        Args:
            number: Returns the number of the step, from 1 on; it may wait for the device.
        """

    def lowered(self, closing: bool = True, number: int | None = None) -> Hashable:
        """Return the program that `lower` shows: that which needs most memory.

        Args:
            closing: Whether it may exchange something; of the names in `options`, as the next.
            number: The number of the step, whatever it does.
        """

    def step(
        self,
        program: Any,
        state: TrainState,
        objective: Objective,
        over: Replicas,
        layout: Layout,
    ) -> tuple[TrainState, Traffic]:
        """Return the state after a step of one replica, and what was sent for it.

        Args:
            program: Which one is traced.
            state: Of this replica, with one row.
            objective: The loss over this replica's batch, and its gradient.
            over: The reductions over the replicas.
            layout: How XLA splits a replica; its `params` are `None` if it is one device.
        """
        ...
