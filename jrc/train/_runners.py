"""The ways to run the step of one replica on all replicas: jit, shard_map, pmap."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jrc._typing import Array, PyTree
from jrc.dgc import dgc_specs
from jrc.train._replica import StepInfo
from jrc.train._split import PlacedStep, Split, needs_placement
from jrc.train._state import TrainState, names_of

WHO = "jrc.make_train_step"


def _via_jit(body: Callable[..., Any], mesh: Mesh, axis_name: Any, donate: bool) -> Any:
    donated = (0,) if donate else ()
    if not needs_placement(mesh, names_of(axis_name), "jit"):
        return jax.jit(body, donate_argnums=donated)

    def build(split: Split | None, shardings: Any) -> Any:
        return _jit(functools.partial(body, split=split), donated, shardings)

    return PlacedStep(build, mesh, names_of(axis_name), "jit", WHO)


def _via_shard_map(body: Callable[..., Any], mesh: Mesh, axis_name: Any, donate: bool) -> Any:
    donated = (0,) if donate else ()
    names = names_of(axis_name)

    def build(split: Split | None, shardings: Any) -> Any:
        def call(state: TrainState, batch: PyTree) -> tuple[TrainState, StepInfo]:
            specs = dgc_specs(state, axis_name)
            return jax.shard_map(
                functools.partial(body, split=split),
                mesh=mesh,
                axis_names=set(mesh.axis_names if split is None else names),
                in_specs=(specs, PartitionSpec(names)),
                out_specs=(specs, PartitionSpec()),
                # With replication types JAX would sum gradients before they are compressed, and
                # refuse loss functions that scan over a constant carry.
                check_vma=False,
            )(state, batch)

        return _jit(call, donated, shardings)

    if not needs_placement(mesh, names, "shard_map"):
        return build(None, None)
    return PlacedStep(build, mesh, names, "shard_map", WHO)


def _jit(call: Callable[..., Any], donated: tuple[int, ...], shardings: Any) -> Any:
    """Return the compiled call; a state with shardings keeps them."""
    if shardings is None:
        return jax.jit(call, donate_argnums=donated)
    return jax.jit(call, donate_argnums=donated, out_shardings=(shardings, None))


def _via_pmap(body: Callable[..., Any], mesh: Mesh, axis_name: str, donate: bool) -> Any:
    del donate  # the leading axis of pmap is added and removed by a copy
    replicas, devices = mesh.shape[axis_name], list(mesh.devices.flat)

    @functools.cache
    def mapped(treedef: Any, local: tuple[bool, ...]) -> Any:
        axes = [0 if is_local else None for is_local in local]

        def flat(leaves: list[Array], batch: PyTree) -> tuple[list[Array], StepInfo]:
            state, info = body(treedef.unflatten(leaves), batch)
            return jax.tree.leaves(state), info

        return jax.pmap(flat, axis_name, in_axes=(axes, 0), out_axes=(axes, None), devices=devices)

    def spread(x: Array | np.ndarray) -> Array:
        return jnp.reshape(x, (replicas, -1, *jnp.shape(x)[1:]))

    def call(state: TrainState, batch: PyTree) -> tuple[TrainState, StepInfo]:
        leaves, treedef = jax.tree.flatten(state)
        specs = jax.tree.leaves(dgc_specs(state, axis_name))
        local = tuple(spec != PartitionSpec() for spec in specs)
        pairs = zip(leaves, local, strict=True)
        stacked = [spread(x) if is_local else x for x, is_local in pairs]
        new, info = mapped(treedef, local)(stacked, jax.tree.map(spread, batch))
        joined = [
            x.reshape(-1, *x.shape[2:]) if is_local else x
            for x, is_local in zip(new, local, strict=True)
        ]
        return treedef.unflatten(joined), info

    return call


RUNNERS: dict[str, Callable[..., Any]] = {
    "shard_map": _via_shard_map,
    "pmap": _via_pmap,
    "jit": _via_jit,
}
"""Functions of `(body, mesh, axis_name, donate)` that return `call(state, batch)`, by name."""
