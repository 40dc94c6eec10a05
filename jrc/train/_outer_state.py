"""The state of an outer optimizer: its first one, and how it is split inside of a replica."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrc._specs import mirrored, number_of_shards, restricted, shards_of, trimmed
from jrc._tree import is_typed_key
from jrc._typing import PyTree
from jrc.dgc._internal import state_specs
from jrc.outer_optimizers import OuterOptimizer, OuterState
from jrc.outer_optimizers._internal import (
    Fragment,
    Kept,
    first_kept,
    fragment_count,
    fragments_of,
    initial_state,
)
from jrc.train._extra_args import differentiated
from jrc.train._placement import inner_axes, own_specs, placed_array


def first_outer_state(
    outer: OuterOptimizer,
    params: PyTree,
    model_state: PyTree,
    opt_state: PyTree,
    mesh: Mesh,
    names: tuple[str, ...],
    who: str,
    shapes: bool = False,
) -> OuterState:
    """Return the state before the first step, with one row for one replica.

    Args:
        outer: The outer optimizer.
        params: The parameters, or their shapes with shardings.
        model_state: The model state, likewise.
        opt_state: The first state of the inner optimizer.
        mesh: The mesh of the run.
        names: The axes of the step.
        who: The public function, for errors.
        shapes: Whether shapes will do.

    Returns:
        The state, or its shapes.
    """
    count = fragment_count(outer)
    given = params, model_state
    if not inner_axes(mesh, names):
        fragments = fragments_of(params, count, who)
        first = functools.partial(first_kept, outer, fragments)
    else:
        specs = (
            own_specs(params, mesh, who, "params"),
            own_specs(model_state, mesh, who, "model_state"),
        )
        fragments = split_fragments(params, specs[0], count, mesh, who)
        first, given = _on_shards(outer, fragments, given, specs, mesh, names, shapes)

    def state(params: PyTree, model_state: PyTree, opt_state: PyTree, kept: Kept) -> OuterState:
        return initial_state(kept, count, params, model_state, opt_state)

    if shapes:
        kept = jax.eval_shape(first, *map(_plain, given))
        return jax.eval_shape(state, *map(_plain, (params, model_state, opt_state)), kept)
    return state(params, model_state, opt_state, first(*given))


def _on_shards(
    outer: OuterOptimizer,
    fragments: Sequence[Fragment],
    given: tuple[PyTree, PyTree],
    specs: tuple[PyTree, PyTree],
    mesh: Mesh,
    names: tuple[str, ...],
    shapes: bool,
) -> tuple[Any, tuple[PyTree, PyTree]]:
    """Return what makes the first state on the shards of each device, and its arguments."""
    # With automatic axes, whatever those of the run are.
    automatic = Mesh(mesh.devices, mesh.axis_names)
    first = functools.partial(first_kept, outer, fragments)
    own = [shapes_of_shards(_plain(x), spec, mesh) for x, spec in zip(given, specs, strict=True)]
    found = jax.eval_shape(first, *own)
    out = kept_specs(found, fragments, own[0], specs[0], inside_names(mesh, names))
    run = jax.shard_map(first, mesh=automatic, in_specs=specs, out_specs=out, check_vma=False)
    if shapes:
        return run, given
    place = lambda x, spec: placed_array(x, NamedSharding(automatic, spec))  # noqa: E731
    return jax.jit(run), jax.tree.map(place, given, specs)


def _plain(tree: PyTree) -> PyTree:
    """Return shapes without shardings."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        dtype = x.dtype if is_typed_key(x) else jnp.result_type(x)
        return jax.ShapeDtypeStruct(np.shape(x), dtype)

    return jax.tree.map(shape, tree)


def inside_names(mesh: Mesh, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return all mesh axes inside of a replica, those of one device too."""
    return tuple(name for name in mesh.axis_names if name not in names)


def kept_specs(
    kept: Kept,
    fragments: Sequence[Fragment],
    params: PyTree,
    specs: PyTree,
    axes: tuple[str, ...],
) -> Kept:
    """Return how the state of an outer optimizer is split inside of a replica.

    Args:
        kept: The state or its shapes, without rows; whole, or of one device as `params` are.
        fragments: The parts of the parameters.
        params: The parameters or their shapes.
        specs: A `PartitionSpec` for each.
        axes: The mesh axes inside of a replica.

    Returns:
        Arrays that mirror a parameter are split as it is, scalars are equal on all devices, and
        others have a part for each device along their first axis.
    """

    def part_specs(state: PyTree, fragment: Fragment) -> PyTree:
        found = mirrored(state, fragment.shapes(params), fragment.each(specs))
        return jax.tree.structure(state).unflatten(
            [
                _of_each_device(each.leaf, axes)
                if each.spec is None
                else PartitionSpec(*((None,) if each.rows else ()), *each.spec)
                for each in found
            ]
        )

    def all_specs(states: PyTree) -> PyTree:
        if len(fragments) == 1:
            return part_specs(states, fragments[0])
        return tuple(map(part_specs, states, fragments))

    flight = jax.tree.map(lambda x: _of_each_device(x, axes), kept.in_flight)
    return Kept(all_specs(kept.local), all_specs(kept.shared), flight)


def _of_each_device(leaf: Any, axes: tuple[str, ...]) -> PartitionSpec:
    return PartitionSpec(axes) if np.ndim(leaf) and axes else PartitionSpec()


def outer_state_specs(
    state: OuterState,
    params: PyTree,
    specs: PyTree,
    model_specs: PyTree,
    mesh: Mesh,
    names: tuple[str, ...],
) -> OuterState:
    """Return how a state is split over the mesh: rows over the replicas, and inside of them.

    Args:
        state: The state or its shapes, with rows.
        params: The parameters, or their shapes.
        specs: A `PartitionSpec` for each parameter.
        model_specs: One for each leaf of the model state.
        mesh: The mesh.
        names: The axes of the step.

    Returns:
        The state with a `PartitionSpec` in each leaf's place.
    """
    whole: Any = PartitionSpec()
    fragments = split_fragments(params, specs, state.report.kept.size, mesh)
    own = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state.local)
    axes = inside_names(mesh, names)
    kept = Kept(own.outer, state.shared, own.in_flight)
    kept = kept_specs(kept, fragments, params, specs, axes)
    inner = state_specs(own.opt_state, names[0], differentiated(params), differentiated(specs))
    own = own._replace(
        params=specs,
        model_state=model_specs,
        opt_state=inner,
        outer=kept.local,
        loss=whole,
        grad_norm=whole,
        steps=whole,
        failed=whole,
        in_flight=kept.in_flight,
    )
    rows = jax.tree.map(lambda spec: trimmed(PartitionSpec(names[0], *spec)), own)
    report = jax.tree.map(lambda _: whole, state.report)
    shared = jax.tree.map(lambda spec: restricted(spec, axes), kept.shared)
    return OuterState(whole, shared, report, rows)


def split_fragments(
    params: PyTree, specs: PyTree, count: int, mesh: Mesh, who: str = "jrc.init_state"
) -> tuple[Fragment, ...]:
    """Return fragments of parameters that are split inside of a replica.

    A leaf whose leading axis is split is not cut: its rows lie on different devices.

    Args:
        params: Arrays or shapes.
        specs: A `PartitionSpec` for each.
        count: The number of fragments.
        mesh: The mesh.
        who: The public function, for an error.
    """
    leading = [PartitionSpec(*spec[:1]) for spec in jax.tree.leaves(specs)]
    split = {at for at, spec in enumerate(leading) if number_of_shards(spec, mesh.shape) > 1}
    return fragments_of(params, count, who, split)


def fragments_where_they_lie(params: PyTree, count: int) -> tuple[Fragment, ...]:
    """Return the fragments of arrays, or of shapes with shardings, whatever mesh they lie on."""
    leaves = enumerate(jax.tree.leaves(params))
    split = {at for at, x in leaves if shards_of(x, first=0, end=1) > 1}
    return fragments_of(params, count, uncut=split)


def shapes_of_shards(tree: PyTree, specs: PyTree, mesh: Mesh) -> PyTree:
    """Return the shapes of what one device has of arrays that are split."""

    def shard(x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        entries = [PartitionSpec(entry) for entry in spec]
        parts = [number_of_shards(entry, mesh.shape) for entry in entries]
        parts += [1] * (len(x.shape) - len(parts))
        shape = tuple(size // part for size, part in zip(x.shape, parts, strict=True))
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return jax.tree.map(shard, tree, specs)
