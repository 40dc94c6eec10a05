"""The devices of one replica: how its arrays are split, and functions of the shards of a device.

Inner steps leave all splitting to XLA. An exchange must not: a message is made of the shards of one
device, and goes to the devices with the same shards in the other replicas. So the axes inside of a
replica, automatic or explicit, are made manual around it.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jrc._specs import number_of_shards, restricted
from jrc._typing import Array, PyTree
from jrc.outer_optimizers import LocalState
from jrc.outer_optimizers._internal import Fragment, fragments_of
from jrc.train._outer_state import inside_names, shapes_of_shards, split_fragments
from jrc.train._split import Split
from jrc.train._state import TrainState


@dataclasses.dataclass(frozen=True, eq=False)
class Inside:
    """How the replicas of a step are split.

    Attributes:
        axes: The mesh axes inside of a replica; empty if it is one device.
        specs: The specs of the whole train state, rows included; `None` without axes.
        mesh: The mesh; `None` without axes.
    """

    axes: tuple[str, ...] = ()
    specs: TrainState | None = None
    mesh: Mesh | None = None

    @property
    def params(self) -> PyTree:
        """Return the specs of the parameters, over the axes inside."""
        return None if self.shared is None else self.shared.params

    @property
    def model_state(self) -> PyTree:
        """Return the specs of the model state, over the axes inside."""
        return None if self.shared is None else self.shared.model_state

    @property
    def shared(self) -> TrainState | None:
        """Return the specs of what replicas share, over the axes inside."""
        if self.specs is None:
            return None
        return jax.tree.map(self._inner, without_local(self.specs))

    @property
    def own(self) -> LocalState | None:
        """Return the specs of what a replica has in an exchange, without the axis of rows."""
        if self.specs is None:
            return None
        rows = in_exchange(self.specs.opt_state.local)
        return jax.tree.map(lambda spec: self._inner(PartitionSpec(*spec[1:])), rows)

    def _inner(self, spec: PartitionSpec) -> PartitionSpec:
        return restricted(spec, self.axes)

    def run(self, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Return `fn` so that it gets the shards of a device, and its results joined."""
        if not self.axes:
            return fn
        return jax.shard_map(
            fn,
            axis_names=set(self.axes),
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

    def total(self, x: Array) -> Array:
        """Return the sum over the devices of a replica, where `run` runs."""
        return lax.psum(x, self.axes) if self.axes else x

    def fragments(self, params: PyTree, count: int) -> tuple[Fragment, ...]:
        """Return the fragments of the parameters."""
        if self.specs is None or self.mesh is None:
            return fragments_of(params, count)
        return split_fragments(params, self.specs.params, count, self.mesh)

    def shapes(self, state: TrainState, name: str) -> PyTree:
        """Return the shapes of a device's shards of a state's `params` or `model_state`."""
        tree = getattr(state, name)
        if self.specs is None or self.mesh is None:
            return tree
        return shapes_of_shards(tree, getattr(self.specs, name), self.mesh)

    def copies(self) -> PyTree:
        """Return for each parameter how many devices of a replica have the same shard; 1 alone."""
        if self.specs is None or self.mesh is None:
            return None
        mesh = self.mesh
        devices = math.prod(mesh.shape[name] for name in self.axes)
        return jax.tree.map(
            lambda spec: devices // number_of_shards(spec, mesh.shape), self.specs.params
        )


def inside_of(split: Split | None) -> Inside:
    """Return how replicas are split; `None` is one device each."""
    if split is None:
        return Inside()
    return Inside(inside_names(split.mesh, split.names), split.state, split.mesh)


def without_local(state: TrainState) -> TrainState:
    """Return what replicas share of a state with an outer optimizer."""
    return state._replace(opt_state=state.opt_state._replace(local=None))


def in_exchange(own: LocalState) -> LocalState:
    """Return what an exchange reads and writes of what a replica has."""
    return own._replace(opt_state=None, in_flight=None)
