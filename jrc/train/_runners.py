"""The ways to run the step of one replica on all replicas: jit, shard_map, pmap."""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jrc._layout import Layout, placed, same_types
from jrc._specs import axes_of, restricted, spec_of
from jrc._targets import is_compile_only
from jrc._tree import aval_of, has_tracers
from jrc._typing import Array, PyTree
from jrc.train._replica import StepInfo
from jrc.train._state import TrainState
from jrc.train._synchronisation import Synchronisation

VIAS = ("shard_map", "pmap", "jit")


Body = Callable[..., tuple[TrainState, StepInfo]]
"""`replica_step` from its argument `way` on."""


class Programs:
    """The compiled steps of a run: one for each program, kind of state and way to lie on the mesh.

    Where XLA splits a replica, a step keeps the shardings of its state. Batches are placed on the
    mesh, their examples over the axes of the step.
    """

    def __init__(self, body: Body, layout: Layout, via: str, donate: bool) -> None:
        self.layout, self.via = layout, via
        self._body, self._donated = body, (0,) if donate else ()
        self._known: dict[Any, Callable[..., Any]] = {}
        self._splits: dict[Any, set[tuple[PartitionSpec, ...]]] = {}

    @property
    def is_split(self) -> bool:
        """Whether XLA splits arrays: on several devices of one `jit`, or inside of a replica."""
        layout = self.layout
        return bool(layout.splits_replicas) or (self.via == "jit" and layout.mesh.size > 1)

    @property
    def places_batches(self) -> bool:
        """Whether batches must be placed, and the mesh set, by more than `jit` does by itself."""
        return self.via != "pmap" and (self.is_split or self.layout.is_explicit)

    def mesh(self) -> Any:
        """Set the mesh of the step, so that a loss function may name its axes."""
        if not self.places_batches:
            return outside_of_meshes()
        mesh = self.layout.mesh
        if self.layout.is_explicit and not is_compile_only(mesh.devices.flat[0]):
            try:  # what is made of shapes alone, as optax.MultiSteps does, keeps its split
                return jax.set_mesh(mesh)
            except ValueError:
                pass  # inside of jax.jit only an abstract one can be set
        return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)

    def with_splits(self, state: TrainState, needed: bool) -> TrainState:
        """Return a traced state as shapes with the shardings of its arrays; any other as it is.

        Types of traced arrays name explicit axes alone. How arrays lie over automatic ones is known
        of a state of the same form that was not traced.

        Args:
            state: The state.
            needed: Whether it must be known. Else a traced state comes back as it is where XLA
                splits a whole step, which then keeps no shardings.

        Raises:
            ValueError: If it must be known and is not.
        """
        if not self.is_split:
            return state
        leaves, treedef = jax.tree.flatten(state)
        form = form_of(state)
        if not has_tracers(leaves):
            if any(getattr(x, "sharding", None) is not None for x in leaves):
                self._splits.setdefault(form, set()).add(tuple(map(spec_of, leaves)))
            return state
        seen = self._splits.get(form, set())
        specs = next(iter(seen)) if len(seen) == 1 else None
        if set(self.layout.mesh.axis_types) == {AxisType.Explicit}:
            specs = tuple(map(spec_of, leaves))
        if specs is None:
            if self.via == "jit" and not needed:
                return state
            raise ValueError(
                "a step of split arrays must know how they are split, got a traced state, whose "
                f"types do not tell for automatic mesh axes, after {len(seen)} ways to split one. "
                "Call step.lower(state, batch) once outside of jax.jit, with arrays or with "
                "shapes that have shardings; make a step for each way."
            )
        shardings = [NamedSharding(self.layout.mesh, spec) for spec in specs]
        shapes = map(placed, map(aval_of, leaves), shardings)
        return treedef.unflatten(shapes)

    def shapes(self, state: TrainState, batch: PyTree) -> tuple[TrainState, PyTree]:
        """Return shapes of state and batch, with the shardings that their arrays will have."""
        state, batch = jax.tree.map(aval_of, (state, batch))
        return state, self._placed(batch) if self.places_batches else batch

    def __call__(
        self,
        way: Synchronisation,
        program: Hashable,
        state: TrainState,
        batch: PyTree,
        like: TrainState,
    ) -> tuple[TrainState, StepInfo]:
        """Do one step of a state that is split like another one: itself, unless it is traced."""
        state, info = self._built(way, program, like)(state, self._placed(batch))
        if not way.reports_rows:
            return state, info
        aux = jax.tree.map(_local_rows, info.aux)
        return state, info._replace(losses=_local_rows(info.losses), aux=aux)

    def lower(
        self, way: Synchronisation, program: Hashable, state: TrainState, batch: PyTree
    ) -> jax.stages.Lowered:
        """Return a lowered program."""
        call: Any = self._built(way, program, state)
        return call.lower(state, self._placed(batch))

    def placed_inside(self, state: TrainState, batch: PyTree) -> Callable[[Any], Any] | None:
        """Return what gives the arguments of the loss function the shardings that XLA gives them.

        There are none where each device runs the loss function by itself.
        """
        if not self.is_split:
            return None
        layout = self.layout.with_params(state.params)
        params, rows = layout.params, layout.batch(batch)
        if self.via == "shard_map":
            params, rows = layout.within(params), layout.within(rows)

        def placed_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
            mesh = jax.sharding.get_abstract_mesh() if self.via == "shard_map" else layout.mesh

            def split(x: Any, spec: PartitionSpec) -> Any:
                return x.update(sharding=NamedSharding(mesh, spec)) if axes_of(spec) else x

            first, *between, examples, key = args
            examples = jax.tree.map(split, examples, rows)
            return jax.tree.map(split, first, params), *between, examples, key

        return placed_args

    def _placed(self, batch: PyTree) -> PyTree:
        layout = self.layout
        if self.places_batches:
            return jax.tree.map(_placed_leaf, batch, layout.shardings(layout.batch(batch)))
        if self.via == "pmap":
            return batch
        rows = NamedSharding(layout.mesh, PartitionSpec(layout.names))
        return jax.tree.map(lambda x: placed(x, rows) if _lies_elsewhere(x, rows) else x, batch)

    def _built(
        self, way: Synchronisation, program: Hashable, state: TrainState
    ) -> Callable[..., Any]:
        layout, specs = self.layout.of_single_devices(), None
        if self.is_split and not has_tracers(state):
            layout = self.layout.with_params(state.params)
            specs = way.specs(state, layout)
            layout = dataclasses.replace(layout, state=specs)
        leaves, treedef = jax.tree.flatten(specs if specs is not None else state)
        key = program, treedef, () if specs is None else tuple(leaves)
        if key not in self._known:
            rows = way.row_specs(state, self.layout)
            body = functools.partial(self._body, way, program, layout)
            self._known[key] = self._compiled(body, layout, rows, info_specs(way, layout))
        return self._known[key]

    def _compiled(
        self, body: Callable[..., Any], layout: Layout, rows: TrainState, infos: StepInfo
    ) -> Callable[..., Any]:
        """Return the step of all replicas, with the specs of rows in state and report."""
        if self.via == "pmap":
            return _pmapped(body, layout, rows, infos, self._donated)
        call: Callable[..., Any] = body
        if self.via == "shard_map":
            call = jax.shard_map(
                body,
                mesh=layout.mesh,
                axis_names=set(layout.names if layout.params is not None else layout.mesh.shape),
                in_specs=(rows, PartitionSpec(layout.names)),
                out_specs=(rows, infos),
                # With replication types JAX would sum gradients before they are compressed, and
                # refuse loss functions that scan over a constant carry.
                check_vma=False,
            )

        def train_step(state: TrainState, batch: PyTree) -> tuple[TrainState, StepInfo]:
            return call(state, batch)

        if layout.state is None:
            return jax.jit(train_step, donate_argnums=self._donated)
        # Rows of a report are whole on a device of their replica.
        reports = None if infos.losses == PartitionSpec() else layout.shardings(infos)
        out = layout.shardings(layout.state), reports
        return jax.jit(train_step, donate_argnums=self._donated, out_shardings=out)


def form_of(state: TrainState) -> Any:
    """Return what the arrays of a state have in common with those of the next: structure, types."""
    leaves, treedef = jax.tree.flatten(state)
    return treedef, tuple((getattr(x, "shape", None), getattr(x, "dtype", None)) for x in leaves)


def _placed_leaf(x: Any, sharding: NamedSharding) -> Any:
    """Return an array of a batch with this sharding; of a traced one its explicit axes."""
    if not isinstance(x, jax.core.Tracer):
        return placed(x, sharding)
    mesh = sharding.mesh
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    spec = restricted(sharding.spec, [name for name, kind in kinds if kind is AxisType.Explicit])
    return jax.sharding.reshard(x, NamedSharding(mesh, spec)) if axes_of(spec) else x


def _lies_elsewhere(x: Any, sharding: NamedSharding) -> bool:
    """Whether an array lies on other devices, or on a mesh with axes of other types."""
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array) or not x.committed:
        return False
    devices = x.sharding.device_set == sharding.device_set
    return not (devices and same_types(x.sharding, sharding))


def outside_of_meshes() -> Any:
    """Unset the mesh of `jax.set_mesh`, whose axis types may differ from the step's own mesh."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def _pmapped(
    body: Callable[..., Any],
    layout: Layout,
    rows: TrainState,
    infos: StepInfo,
    donated: tuple[int, ...],
) -> Callable[..., Any]:
    """Return the step over `jax.pmap`, whose leading axis is added and removed by a copy."""
    devices = list(layout.mesh.devices.flat)
    specs, treedef = jax.tree.flatten(rows)
    axes = [0 if spec else None for spec in specs]
    outs = jax.tree.map(lambda spec: 0 if spec else None, infos)

    def flat(leaves: list[Array], batch: PyTree) -> tuple[list[Array], StepInfo]:
        state, info = body(treedef.unflatten(leaves), batch)
        return jax.tree.leaves(state), info

    mapped = jax.pmap(
        flat,
        layout.replicas,
        in_axes=(axes, 0),
        out_axes=(axes, outs),
        devices=devices,
        donate_argnums=donated,
    )

    def spread(x: Array | np.ndarray) -> Array:
        return jnp.reshape(x, (len(devices), -1, *jnp.shape(x)[1:]))

    def joined(x: Array) -> Array:
        return x.reshape(-1, *x.shape[2:])

    def call(state: TrainState, batch: PyTree) -> tuple[TrainState, StepInfo]:
        pairs = zip(jax.tree.leaves(state), specs, strict=True)
        stacked = [spread(x) if spec else x for x, spec in pairs]
        new, info = mapped(stacked, jax.tree.map(spread, batch))
        if infos.losses:
            info = info._replace(losses=joined(info.losses), aux=jax.tree.map(joined, info.aux))
        pairs = zip(new, specs, strict=True)
        return treedef.unflatten([joined(x) if spec else x for x, spec in pairs]), info

    return call


def info_specs(way: Synchronisation, layout: Layout) -> StepInfo:
    """Return the specs of a report: its rows are losses and aux, where they are not reduced."""
    own = PartitionSpec(layout.names) if way.reports_rows else PartitionSpec()
    local = {"losses": own, "aux": own}
    specs: list[Any] = [local.get(name, PartitionSpec()) for name in StepInfo._fields]
    return StepInfo(*specs)


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
