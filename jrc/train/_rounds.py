"""The choice between the compiled steps of a run with `outer=`, by the number of the step."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrc._typing import PyTree
from jrc._validate import whole_number
from jrc.outer_optimizers import OuterOptimizer
from jrc.outer_optimizers._internal import INNER, Turn, overlap_of, turn_at
from jrc.train._state import TrainState

_WHO = "jrc.make_train_step"


class Rounds:
    """The compiled steps: one that ends the round of a fragment runs every `sync_every` steps.

    The number of a step is read from the state once, which waits for the device; after that it is
    counted as long as each call gets the state that the call before returned. A restored state is
    another one, so that a resumed run takes its rounds at the same steps.
    """

    def __init__(self, build: Callable[[Turn], Any], outer: OuterOptimizer) -> None:
        self._build, self._outer = build, outer
        self._known: dict[Turn, Any] = {}
        self._last: Any = None
        self._number = 0

    def __call__(self, state: TrainState, batch: PyTree) -> Any:
        """Do one step."""
        number = self._number if state.step is self._last else _number_of(state.step)
        state, info = self._program(turn_at(self._outer, number + 1))(state, batch)
        self._last, self._number = state.step, number + 1
        return state, info._replace(
            losses=_local_rows(info.losses), aux=jax.tree.map(_local_rows, info.aux)
        )

    def lower(
        self, state: TrainState, batch: PyTree, closing: bool = True, number: int | None = None
    ) -> jax.stages.Lowered:
        """Return a lowered program: that which exchanges the last fragment needs most memory."""
        turn = INNER
        if number is not None:
            remedy = "The first step is 1."
            turn = turn_at(
                self._outer,
                whole_number(number, "number", "jrc.TrainStep.lower", least=1, remedy=remedy),
            )
        elif closing:
            turn = turn_at(self._outer, int(self._outer.sync_every) + overlap_of(self._outer))
        return self._program(turn).lower(state, batch)

    def _program(self, turn: Turn) -> Any:
        if turn not in self._known:
            self._known[turn] = self._build(turn)
        return self._known[turn]


def _local_rows(x: Any) -> Any:
    """Return the rows of this process, so that it can read them; with one process that is all."""
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer) or x.is_fully_addressable:
        return x
    # Of a replica that is split each of its devices has the row.
    rows = {shard.index[0].start or 0: shard for shard in x.addressable_shards}
    shards = [rows[start] for start in sorted(rows)]
    mesh = Mesh([shard.device for shard in shards], ("data",))
    shape = sum(shard.data.shape[0] for shard in shards), *x.shape[1:]
    return jax.make_array_from_single_device_arrays(
        shape, NamedSharding(mesh, PartitionSpec("data")), [shard.data for shard in shards]
    )


def _number_of(step: Any) -> int:
    """Return the number of steps so far."""
    if isinstance(step, jax.core.Tracer):
        raise TypeError(
            f"{_WHO}: a step with outer= must be called outside of jax.jit, because the number of "
            "the step decides which program runs, got a traced state. Call it in a Python loop."
        )
    if isinstance(step, jax.Array) and not step.is_fully_addressable:
        step = step.addressable_data(0)
    return int(np.asarray(step))
