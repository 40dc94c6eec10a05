"""The ways to run the step of one replica on all replicas: jit, shard_map, pmap."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrc._typing import Array, PyTree
from jrc.train._replica import StepInfo
from jrc.train._rows import outer_states, row_specs
from jrc.train._split import PlacedStep, Split, needs_placement
from jrc.train._state import TrainState, names_of

WHO = "jrc.make_train_step"


def _via_jit(body: Callable[..., Any], mesh: Mesh, axis_name: Any, donate: bool) -> Any:
    donated = (0,) if donate else ()
    if not needs_placement(mesh, names_of(axis_name), "jit"):
        return jax.jit(body, donate_argnums=donated)

    def build(split: Split | None, shardings: Any) -> Any:
        run = body if split is None else functools.partial(body, split=split)
        return _jit(run, donated, shardings)

    return PlacedStep(build, mesh, names_of(axis_name), "jit", WHO)


def _via_shard_map(body: Callable[..., Any], mesh: Mesh, axis_name: Any, donate: bool) -> Any:
    donated = (0,) if donate else ()
    names = names_of(axis_name)

    def build(split: Split | None, shardings: Any) -> Any:
        def call(state: TrainState, batch: PyTree) -> tuple[TrainState, StepInfo]:
            specs = row_specs(state, axis_name)
            return jax.shard_map(
                body if split is None else functools.partial(body, split=split),
                mesh=mesh,
                axis_names=set(mesh.axis_names if split is None else names),
                in_specs=(specs, PartitionSpec(names)),
                out_specs=(specs, info_specs(state, names)),
                # With replication types JAX would sum gradients before they are compressed, and
                # refuse loss functions that scan over a constant carry.
                check_vma=False,
            )(state, batch)

        return _jit(call, donated, shardings, _info_shardings(shardings, mesh, names))

    if not needs_placement(mesh, names, "shard_map"):
        return build(None, None)
    return PlacedStep(build, mesh, names, "shard_map", WHO)


def _jit(
    call: Callable[..., Any], donated: tuple[int, ...], shardings: Any, infos: Any = None
) -> Any:
    """Return the compiled call; a state with shardings keeps them."""
    if shardings is None:
        return jax.jit(call, donate_argnums=donated)
    return jax.jit(call, donate_argnums=donated, out_shardings=(shardings, infos))


def _info_shardings(shardings: Any, mesh: Mesh, names: tuple[str, ...]) -> Any:
    """Return those of a report whose rows are not reduced, so that a row is whole on a device."""
    if not outer_states(shardings):
        return None
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), info_specs(shardings, names))


def _via_pmap(body: Callable[..., Any], mesh: Mesh, axis_name: str, donate: bool) -> Any:
    del donate  # the leading axis of pmap is added and removed by a copy
    replicas, devices = mesh.shape[axis_name], list(mesh.devices.flat)

    @functools.cache
    def mapped(treedef: Any, local: tuple[bool, ...]) -> Any:
        axes = [0 if is_local else None for is_local in local]
        infos = _axes_of(info_specs(treedef.unflatten(local), (axis_name,)))

        def flat(leaves: list[Array], batch: PyTree) -> tuple[list[Array], StepInfo]:
            state, info = body(treedef.unflatten(leaves), batch)
            return jax.tree.leaves(state), info

        return jax.pmap(flat, axis_name, in_axes=(axes, 0), out_axes=(axes, infos), devices=devices)

    def spread(x: Array | np.ndarray) -> Array:
        return jnp.reshape(x, (replicas, -1, *jnp.shape(x)[1:]))

    def call(state: TrainState, batch: PyTree) -> tuple[TrainState, StepInfo]:
        leaves, treedef = jax.tree.flatten(state)
        specs = jax.tree.leaves(row_specs(state, axis_name))
        local = tuple(spec != PartitionSpec() for spec in specs)
        pairs = zip(leaves, local, strict=True)
        stacked = [spread(x) if is_local else x for x, is_local in pairs]
        new, info = mapped(treedef, local)(stacked, jax.tree.map(spread, batch))
        info = _joined(info, info_specs(state, (axis_name,)))
        joined = [
            x.reshape(-1, *x.shape[2:]) if is_local else x
            for x, is_local in zip(new, local, strict=True)
        ]
        return treedef.unflatten(joined), info

    return call


def info_specs(state: PyTree, names: tuple[str, ...]) -> PyTree:
    """Return the specs of a report: with an outer optimizer losses and aux are not reduced."""
    own = PartitionSpec(names) if outer_states(state) else PartitionSpec()
    local = {"losses": own, "aux": own}
    specs: list[Any] = [local.get(name, PartitionSpec()) for name in StepInfo._fields]
    return StepInfo(*specs)


def _axes_of(specs: PyTree) -> PyTree:
    """Return the axes of pmap's results for the specs of shard_map."""
    return jax.tree.map(lambda spec: None if spec == PartitionSpec() else 0, specs)


def _joined(info: StepInfo, specs: PyTree) -> StepInfo:
    """Return a report whose rows lie along one axis, not two."""
    if specs.losses == PartitionSpec():
        return info
    join = lambda x: jnp.reshape(x, (-1, *x.shape[2:]))  # noqa: E731
    return info._replace(losses=join(info.losses), aux=jax.tree.map(join, info.aux))


RUNNERS: dict[str, Callable[..., Any]] = {
    "shard_map": _via_shard_map,
    "pmap": _via_pmap,
    "jit": _via_jit,
}
"""Functions of `(body, mesh, axis_name, donate)` that return `call(state, batch)`, by name."""
