"""The batch must split into equal parts, and be the same batch on every process."""

import math
import zlib

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jrc._errors import listed
from jrc._layout import Layout
from jrc._multihost import differing, differing_copies, of_all, reached_by_all
from jrc._specs import axes_of
from jrc._tree import is_array, is_number, is_traced, kind_of, named_leaves
from jrc._typing import PyTree

_WHOLE_BATCH = "(the batch itself)"
# How long a process whose batch has changed waits for the others.
_SECONDS = 120.0
# The number of the next step; a step has its own from its first call on, the same on every process.
_next_number = 0


def check_batch(batch: PyTree, layout: Layout, accumulate: int, is_placed: bool) -> None:
    """Raise unless the leading axis of every leaf splits into equal parts.

    Args:
        batch: The batch.
        layout: The layout of the run.
        accumulate: Parts of what a device has.
        is_placed: Whether leaves keep a split over more axes than those of the replicas.
    """
    for name, leaf in named_leaves(batch):
        if not (is_array(leaf) and is_number(leaf) or is_traced(leaf)):
            raise ValueError(
                "every leaf of batch must be an array of numbers, with the examples along its "
                f"leading axis, got {type(leaf).__name__} {leaf!r} at {name or _WHOLE_BATCH!r}. "
                "Convert it with jnp.asarray, or take it out."
            )
    replicas = PartitionSpec(layout.names)
    specs = layout.batch(batch) if is_placed else jax.tree.map(lambda _: replicas, batch)
    for (name, leaf), spec in zip(named_leaves(batch), jax.tree.leaves(specs), strict=True):
        over = axes_of(PartitionSpec(*spec[:1]))
        parts = math.prod(layout.mesh.shape[axis] for axis in over) * accumulate
        words = f"the devices that it is split over ({listed(over)}) * accumulate"
        if over == layout.names:
            words = f"replicas * accumulate = {layout.parts} * {accumulate}"
        if jnp.ndim(leaf) == 0 or jnp.shape(leaf)[0] % parts or jnp.shape(leaf)[0] == 0:
            raise ValueError(
                f"the leading axis of every leaf of batch must be a multiple of {words} = "
                f"{parts}, got shape {list(jnp.shape(leaf))} at {name or _WHOLE_BATCH!r}. Drop the "
                "rest of the batch, or use fewer parts."
            )


def check_batch_of_processes(batch: PyTree, axes: tuple[str, ...]) -> None:
    """Raise if processes differ in what all have: a whole array, or copies of the same examples.

    JAX takes an array that lies on one process for the whole batch.
    """
    if names := differing(named_leaves(batch)):
        raise ValueError(
            "arrays of batch on one process must be the whole batch, equal on every "
            f"process, got different {listed(names)}. Join the parts of the processes, of equal "
            "sizes: jax.make_array_from_process_local_data("
            f"NamedSharding(mesh, PartitionSpec({axes!r})), part)."
        )
    if found := differing_copies(named_leaves(batch)):
        name, processes = found[0]
        together = ", ".join(map(str, processes))
        raise ValueError(
            "processes that hold the same examples of batch must hold equal ones, got "
            f"different {name or _WHOLE_BATCH!r} on processes {together}. The batch "
            f"is split over {listed(axes)}, which does not tell these processes apart: give each "
            "of them the same part, or split the batch over an axis that does."
        )


class SameBatch:
    """Checks that processes change the shapes of their batches in the same step.

    Where one process alone has another batch it runs another program, and all wait for each other.
    A process whose batch changes asks the others; the ordinary step asks nothing.
    """

    def __init__(self) -> None:
        self._step, self._number = 0, 0
        self._last: list[tuple[str, str]] = []

    def check(self, batch: PyTree) -> None:
        """Raise if the batch is another than in the last step on some processes only."""
        kinds = [(name, kind_of(leaf)) for name, leaf in named_leaves(batch)]
        if not self._last:
            self._number = _agreed_number()
        if not self._last or self._last == kinds or self._is_of_all(kinds):
            self._last = kinds
            self._step += 1
            return
        changes = [pair for pair in zip(self._last, kinds, strict=False) if pair[0] != pair[1]]
        (name, now), before = ("", "more or fewer leaves"), ""
        if changes:
            ((_, was), (name, now)), *_ = changes
            before = f", {was} before"
        raise ValueError(
            "batch must change its shapes on every process in the same step and alike, "
            f"got {now} at {name or _WHOLE_BATCH!r}{before}, on process "
            f"{jax.process_index()} and not on all. Drop the rest of the data where it runs out, "
            "so that every process has as many parts of equal size."
        )

    def _is_of_all(self, kinds: list[tuple[str, str]]) -> bool:
        """Whether every process comes to this step with such a batch."""
        text = f"{self._number}_{self._step}_{zlib.crc32(repr(kinds).encode())}"
        return reached_by_all(f"jrc_batch_{text}", _SECONDS)


def _agreed_number() -> int:
    """Return a number that no step has had on any process, though some made more than others."""
    global _next_number
    number = int(of_all(_next_number).max()) if jax.process_count() > 1 else _next_number
    _next_number = number + 1
    return number
