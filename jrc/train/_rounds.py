"""The choice between the inner step and the step that ends a round, by the number of the step."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrc._typing import PyTree
from jrc.train._state import TrainState

_WHO = "jrc.make_train_step"


class Rounds:
    """Two compiled steps: the one that ends a round runs every `sync_every` steps.

    The number of a step is read from the state once, which waits for the device; after that it is
    counted as long as each call gets the state that the call before returned. A restored state is
    another one, so that a resumed run takes its rounds at the same steps.
    """

    def __init__(self, inner: Any, closing: Any, sync_every: int) -> None:
        self._inner, self._closing, self._every = inner, closing, sync_every
        self._last: Any = None
        self._number = 0

    def __call__(self, state: TrainState, batch: PyTree) -> Any:
        """Do one step."""
        number = self._number if state.step is self._last else _number_of(state.step)
        closes = (number + 1) % self._every == 0
        state, info = (self._closing if closes else self._inner)(state, batch)
        self._last, self._number = state.step, number + 1
        return state, info._replace(
            losses=_local_rows(info.losses), aux=jax.tree.map(_local_rows, info.aux)
        )

    def lower(self, state: TrainState, batch: PyTree, closing: bool = True) -> jax.stages.Lowered:
        """Return the lowered program of the step that ends a round, which needs more memory."""
        return (self._closing if closing else self._inner).lower(state, batch)


def _local_rows(x: Any) -> Any:
    """Return the rows of this process, so that it can read them; with one process that is all."""
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer) or x.is_fully_addressable:
        return x
    shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0)
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
