"""What is checked before a step runs: arguments, state, batch and mesh fit; processes agree.

`Preflight.check` is called before each step. All of it runs at the first; a state of another
structure, or with other shapes or dtypes, is checked whole again.
"""

import math
import re
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrc._errors import listed
from jrc._layout import Layout, same_types, split_axes
from jrc._multihost import all_or_none, differing, differing_copies, of_all, reached_by_all
from jrc._rng import check_key
from jrc._specs import axes_of
from jrc._tree import (
    aval_of,
    is_array,
    is_traced,
    kind_of,
    named_leaves,
    tree_difference,
)
from jrc._typing import PyTree, Transform
from jrc.dgc._internal import dgc_states, without_axes
from jrc.outer_optimizers import OuterOptimizer
from jrc.train._arguments import check_arrays
from jrc.train._check_axis import check_axis
from jrc.train._check_lookups import warn_of_lookups
from jrc.train._optax import check_structure
from jrc.train._runners import is_split, needs_placement
from jrc.train._state import TrainState
from jrc.train._synchronisation import Synchronisation, row_specs, synchronisation_of

_WHOLE_BATCH = "(the batch itself)"
# How long a process whose batch has changed waits for the others.
_SECONDS = 120.0
# The number of the next step; a step has its own from its first call on, the same on every process.
_next_number = 0


class Preflight:
    """The checks of one step, and what they have found out.

    Args:
        tx: The optimizer.
        outer: The outer optimizer, if there is one.
        layout: The layout of the run.
        via: How the step runs.
        accumulate: Parts of a replica's batch.
        lower: Returns the program of the step before it is planned, from a way, state and batch.
    """

    def __init__(
        self,
        tx: Transform,
        outer: OuterOptimizer | None,
        layout: Layout,
        via: str,
        accumulate: int,
        lower: Callable[[Synchronisation, TrainState, PyTree], jax.stages.Lowered],
    ) -> None:
        self._tx, self._outer, self._layout = tx, outer, layout
        self._via, self._accumulate, self._lower = via, accumulate, lower
        self._known: dict[Any, Synchronisation] = {}
        self._batches, self._agreed = SameBatch(), False

    def check(self, state: TrainState, batch: PyTree, runs: bool = True) -> Synchronisation:
        """Raise unless a step can take this state and this batch.

        Args:
            state: The state, or its shapes.
            batch: The batch, or its shapes.
            runs: Whether a step follows, and not only its program.

        Returns:
            How replicas with such a state agree.
        """
        here = lambda: self._here(state, batch, runs)  # noqa: E731
        if not (runs and self._layout.mesh.is_multi_process):
            return here()
        if self._agreed:
            self._batches.check(batch)
            return here()
        way = all_or_none(here)
        check_batch_of_processes(batch, self._layout.names)
        check_copies_of_batch(batch, self._layout.names)
        self._batches.check(batch)
        self._agreed = True
        return way

    def _here(self, state: Any, batch: PyTree, runs: bool) -> Synchronisation:
        """Check without asking other processes."""
        layout = self._layout
        check_form(state)
        check_batch(batch, layout, self._accumulate, needs_placement(layout, self._via))
        leaves, treedef = jax.tree.flatten(state)
        kinds = [(getattr(x, "shape", None), getattr(x, "dtype", None)) for x in leaves]
        form = treedef, tuple(kinds)
        way = self._known.get(form)
        if way is not None and runs:
            self._check_devices(state)
            return way
        way = synchronisation_of(self._tx, self._outer, state.opt_state)
        check_split_state(state, layout, self._via)
        self._check_state(way, state)
        self._check_devices(state)
        if is_split(layout, self._via):
            self._check_program(way, state, batch)
        if runs:
            self._known[form] = way
        return way

    def _check_devices(self, state: TrainState) -> None:
        if self._via != "pmap":  # pmap copies the state to its devices
            check_devices(state, self._layout.mesh)

    def _check_state(self, way: Synchronisation, state: TrainState) -> None:
        """Raise unless the state was built for these optimizers and these replicas."""
        check_leaves(state)
        layout = self._layout.with_params(state.params)
        params = jax.tree.map(_without_sharding, state.params)
        inner = jax.eval_shape(self._tx.init, params)
        way.check(state.params, state.model_state, inner, layout)
        check_structure(params, inner)
        expected = way.init(state.params, state.model_state, inner, layout, shapes=True)
        difference = tree_difference(without_axes(expected), without_axes(state.opt_state))
        if difference is None:
            difference = check_rows(way, state._replace(opt_state=expected), state, layout)
        if difference is not None:
            argument = "" if self._outer is None else ", outer=outer"
            raise ValueError(
                f"state must be built for {way.made_for}, got one with another opt_state: "
                f"{difference}. Build it with jrc.init_state(params, tx, key{argument})."
            )
        if dgc_states(inner) and layout.parts > 1:
            check_axis(self._tx, params, inner, layout)

    def _check_program(self, way: Synchronisation, state: TrainState, batch: PyTree) -> None:
        """Look into the program, which is lowered once, for what arrays do not tell."""
        found: list[str] = []

        def text() -> str:
            if not found:
                with jax.sharding.use_abstract_mesh(self._layout.mesh.abstract_mesh):
                    found.append(self._lower(way, state, batch).as_text())
            return found[0]

        check_every_axis(text, state, batch, self._layout)
        if self._via != "jit":
            warn_of_lookups(text, state, batch, self._layout)


def check_form(state: Any) -> None:
    """Raise unless this is a `TrainState` whose arrays were not donated."""
    if not isinstance(state, TrainState):
        raise TypeError(
            f"state must be a TrainState of jrc.init_state, got {type(state).__name__}. "
            "Write state = jrc.init_state(params, tx, key)."
        )
    if _is_placed(state.step) and state.step.is_deleted():
        raise ValueError(
            "state must not be donated, got one whose arrays an earlier step has "
            "deleted. Use the state that it returned, or pass donate=False."
        )


def check_devices(state: TrainState, mesh: Mesh) -> None:
    """Raise unless the state lies on the devices of the mesh."""
    step = state.step
    placed = _is_placed(step) and step.committed
    if placed and step.sharding.device_set != set(mesh.devices.flat):
        raise ValueError(
            f"state must lie on the {mesh.size} devices of the step, got one on "
            f"{len(step.sharding.device_set)}, not the same ones. Give jrc.init_state and "
            "jrc.make_train_step the same mesh."
        )
    shared = NamedSharding(mesh, PartitionSpec())
    if placed and mesh.size > 1 and not same_types(step.sharding, shared):
        raise ValueError(
            "state must lie on the mesh of the step, whose axis_types are "
            f"{mesh.axis_types}, got one on {step.sharding}. Give jrc.init_state and "
            "jrc.make_train_step the same mesh."
        )


def _is_placed(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)


def check_leaves(state: TrainState) -> None:
    """Raise unless parameters are floating arrays, and the key is one."""
    check_arrays({"params": state.params, "model_state": state.model_state})
    check_key(state.key)
    for name, leaf in named_leaves(state.params):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise ValueError(
                "every leaf of params must be floating, because it is differentiated, got "
                f"{kind_of(leaf)} at {name!r}. Keep it in the model state."
            )


def check_rows(
    way: Synchronisation, expected: TrainState, state: TrainState, layout: Layout
) -> str | None:
    """Raise unless what differs between replicas has a row for each of them.

    Returns:
        In words, which array of all others has another shape than expected; `None` if none has.
    """
    specs = jax.tree.leaves(row_specs(way, expected, layout).opt_state)
    what = "rows" if way.reports_rows else "compression"
    leaves = jax.tree.leaves(expected.opt_state), named_leaves(state.opt_state), specs
    for want, (name, got), spec in zip(*leaves, strict=True):
        if not spec and jnp.shape(got) != want.shape:
            return f"{name!r} is {kind_of(got)} and not of shape {list(want.shape)}"
        if spec and got.size != want.size * layout.rows:
            if got.shape[:1] == (layout.rows,):
                raise ValueError(
                    "state must fit the split of replicas on this mesh, got rows of "
                    f"{list(got.shape[1:])} for {want.size} entries. Build it with jrc.init_state "
                    "on this mesh, or take it over by jrc.reshard(..., mesh=mesh, outer=outer)."
                )
            raise ValueError(
                f"state must be built for the {layout.rows} replicas of the step, got one "
                f"with {what} for {got.size / want.size:g}. Give jrc.init_state and "
                "jrc.make_train_step the same mesh; without one, via='jit' takes one device, and "
                "jrc.init_state all of them."
            )
    return None


def _without_sharding(leaf: Any) -> jax.ShapeDtypeStruct:
    aval = aval_of(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def check_split_state(state: TrainState, layout: Layout, via: str) -> None:
    """Raise if a state is split as this step cannot take it."""
    if via == "jit":
        if layout.mesh.size > 1 and dgc_states(state.opt_state):
            raise ValueError(
                "tx must not compress with via='jit' on several devices, where XLA "
                f"reduces the gradients, got a compression and {layout.mesh.size} devices. Use "
                "via='shard_map'."
            )
        return
    for what in ("params", "model_state"):
        remedy = (
            "Use via='jit', where XLA gathers parameters and reduces gradients over {over}, or "
            "split them over another mesh axis inside of each replica."
        )
        rule = f"of axis_name with via={via!r}"
        layout.check_whole(layout.specs(getattr(state, what), what), what, rule, remedy)


# The dimensions of a sharding in a program: `<@mesh, [{"data"}, {}]`.
_DIMENSIONS = re.compile(r"<@\w+, (\[[^\]]*\])")


def check_every_axis(
    text: Callable[[], str], state: TrainState, batch: PyTree, layout: Layout
) -> None:
    """Raise if a mesh axis splits nothing: its devices would all do the same work.

    Args:
        text: Returns the text of the program; called where state and batch name too few axes.
        state: The state.
        batch: The batch.
        layout: The layout; the axes of the replicas split the batch.

    Raises:
        ValueError: If neither state, batch nor the program of the loss function names an axis.
    """
    used = split_axes(state, batch)
    missing = [name for name in layout.splits_replicas if name not in used]
    if not missing:
        return
    # Metadata and names of operations may have the name of an axis: only shardings count.
    dimensions = "".join(_DIMENSIONS.findall(text()))
    missing = [name for name in missing if f'"{name}"' not in dimensions]
    if missing:
        raise ValueError(
            f"every axis of the mesh must split something, got {listed(missing)}, over "
            "which neither params, batch nor the loss function is split, so that its devices "
            "would repeat the same work. Split the batch over it, "
            f"PartitionSpec({(*layout.names, *missing)!r}), or the parameters, or leave it out of "
            "the mesh."
        )


def check_batch(batch: PyTree, layout: Layout, accumulate: int, is_placed: bool) -> None:
    """Raise unless the leading axis of every leaf splits into equal parts.

    Args:
        batch: The batch.
        layout: The layout of the run.
        accumulate: Parts of what a device has.
        is_placed: Whether leaves keep a split over more axes than those of the replicas.
    """
    for name, leaf in named_leaves(batch):
        if not (is_array(leaf) or is_traced(leaf)):
            raise ValueError(
                "every leaf of batch must be an array with the examples along its leading "
                f"axis, got {type(leaf).__name__} {leaf!r} at {name or _WHOLE_BATCH!r}. Convert it "
                "with jnp.asarray."
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
    """Raise if an array that lies on one process differs: JAX takes it for the whole batch."""
    if names := differing(named_leaves(batch)):
        raise ValueError(
            "arrays of batch on one process must be the whole batch, equal on every "
            f"process, got different {listed(names)}. Join the parts of the processes, of equal "
            "sizes: jax.make_array_from_process_local_data("
            f"NamedSharding(mesh, PartitionSpec({axes!r})), part)."
        )


def check_copies_of_batch(batch: PyTree, axes: tuple[str, ...]) -> None:
    """Raise if processes that hold the same examples have different ones."""
    if not (found := differing_copies(named_leaves(batch))):
        return
    name, processes = found[0]
    together = ", ".join(map(str, processes))
    raise ValueError(
        "processes that hold the same examples of batch must hold equal ones, got "
        f"different {name or _WHOLE_BATCH!r} on processes {together}. The batch "
        f"is split over {listed(axes)}, which does not tell these processes apart: give each of "
        "them the same part, or split the batch over an axis that does."
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
