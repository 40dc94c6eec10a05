"""How XLA splits a replica, and the step that runs on such a mesh."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrc._specs import axes_of, number_of_shards
from jrc._typing import PyTree
from jrc.train._extra_args import differentiated
from jrc.train._placement import batch_specs, has_explicit, inner_axes, placed_batch
from jrc.train._state import TrainState, specs_of_state


class Split(NamedTuple):
    """How parameters, and so gradients, are split.

    Attributes:
        specs: A `PartitionSpec` for each parameter that is differentiated.
        names: The axes of the step, over which gradients are reduced.
        mesh: The mesh.
        state: A `PartitionSpec` for each leaf of the state.
    """

    specs: PyTree
    names: tuple[str, ...]
    mesh: Mesh
    state: TrainState

    def bytes_of(self, grads: Sequence[Any]) -> float:
        """Return the bytes that a device sends to reduce gradients over the axes of the step.

        A ring all-reduce of its shard over the axes that do not split a leaf, and a ring
        reduce-scatter over those that do.

        Args:
            grads: A leaf for each parameter; `None` is not reduced.
        """
        pairs = zip(grads, jax.tree.leaves(self.specs), strict=True)
        return sum(self._bytes(grad, spec) for grad, spec in pairs if grad is not None)

    def _bytes(self, grad: Any, spec: PartitionSpec) -> float:
        own = grad.size * grad.dtype.itemsize / number_of_shards(spec, self.mesh.shape)
        over = set(axes_of(spec))
        scattered = math.prod(self.mesh.shape[name] for name in self.names if name in over)
        reduced = math.prod(self.mesh.shape[name] for name in self.names if name not in over)
        return own * (scattered - 1) + 2 * own * (reduced - 1) / reduced


def is_split(mesh: Mesh, names: tuple[str, ...], via: str) -> bool:
    """Whether XLA splits arrays: on several devices of one `jit`, or inside of a replica."""
    return bool(inner_axes(mesh, names)) or (via == "jit" and mesh.size > 1)


class PlacedStep:
    """A compiled step that keeps the shardings of its state, for each kind of state and batch.

    Batches are placed on the mesh, their examples over the axes of the step.
    """

    def __init__(
        self,
        build: Callable[[Split | None, Any], Any],
        mesh: Mesh,
        names: tuple[str, ...],
        via: str,
        who: str,
    ) -> None:
        self._build, self._mesh, self._names, self._who = build, mesh, names, who
        self._splits = is_split(mesh, names, via)
        self._known: dict[Any, Any] = {}

    def __call__(self, state: TrainState, batch: PyTree) -> Any:
        """Do one step."""
        return self._built(state)(state, self._placed(batch))

    def lower(self, state: TrainState, batch: PyTree) -> jax.stages.Lowered:
        """Return the lowered program."""
        return self._built(state).lower(state, self._placed(batch))

    def _placed(self, batch: PyTree) -> PyTree:
        return placed_batch(batch, self._mesh, self._names, self._who)

    def _built(self, state: TrainState) -> Any:
        if not self._splits:
            return self._known.setdefault(None, None) or self._remember(None, None, None)
        specs = specs_of_state(state, self._mesh, self._names, self._who)
        leaves, treedef = jax.tree.flatten(specs)
        key = treedef, tuple(leaves)
        if key not in self._known:
            shardings = jax.tree.map(lambda spec: NamedSharding(self._mesh, spec), specs)
            split = Split(differentiated(specs.params), self._names, self._mesh, specs)
            return self._remember(key, split, shardings)
        return self._known[key]

    def _remember(self, key: Any, split: Split | None, shardings: Any) -> Any:
        self._known[key] = self._build(split, shardings)
        return self._known[key]


def needs_placement(mesh: Mesh, names: tuple[str, ...], via: str) -> bool:
    """Whether batches must be placed, or shardings kept, by more than `jit` does by itself."""
    return via != "pmap" and (is_split(mesh, names, via) or has_explicit(mesh))


def spec_of_examples(
    batch: PyTree, mesh: Mesh, names: tuple[str, ...], who: str
) -> list[PartitionSpec]:
    """Return how each leaf of a batch is split once it is placed."""
    return jax.tree.leaves(batch_specs(batch, mesh, names, who))
