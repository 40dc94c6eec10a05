"""The state of an outer optimizer: its first one, and how it is split inside of a replica."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrc._layout import Layout, placed
from jrc._specs import mirrored, number_of_shards, shards_of
from jrc._tree import plain
from jrc._typing import PyTree
from jrc.dgc._internal import state_specs
from jrc.outer_optimizers import LocalState, OuterOptimizer, OuterState
from jrc.outer_optimizers._internal import (
    Fragment,
    Kept,
    first_kept,
    fragment_count,
    fragments_of,
    initial_state,
)
from jrc.train._optax import differentiated
from jrc.train._state import TrainState


def first_outer_state(
    outer: OuterOptimizer,
    params: PyTree,
    model_state: PyTree,
    opt_state: PyTree,
    layout: Layout,
    shapes: bool = False,
) -> OuterState:
    """Return the state before the first step, with one row for one replica.

    Args:
        outer: The outer optimizer.
        params: The parameters, or their shapes with shardings.
        model_state: The model state, likewise.
        opt_state: The first state of the inner optimizer.
        layout: The layout of the run.
        shapes: Whether shapes will do.

    Returns:
        The state, or its shapes.
    """
    count = fragment_count(outer)
    given = params, model_state
    if not layout.splits_replicas:
        fragments = fragments_of(params, count)
        first = functools.partial(first_kept, outer, fragments)
    else:
        first, given = _on_shards(outer, given, layout, shapes)

    def state(params: PyTree, model_state: PyTree, opt_state: PyTree, kept: Kept) -> OuterState:
        return initial_state(kept, count, params, model_state, opt_state)

    if shapes:
        kept = jax.eval_shape(first, *map(plain, given))
        return jax.eval_shape(state, *map(plain, (params, model_state, opt_state)), kept)
    return state(params, model_state, opt_state, first(*given))


def _on_shards(
    outer: OuterOptimizer, given: tuple[PyTree, PyTree], layout: Layout, shapes: bool
) -> tuple[Any, tuple[PyTree, PyTree]]:
    """Return what makes the first state on the shards of each device, and its arguments."""
    fragments = split_fragments(given[0], fragment_count(outer), layout)
    specs = layout.params, layout.specs(given[1], "model_state")
    # With automatic axes, whatever those of the run are.
    automatic = Mesh(layout.mesh.devices, layout.mesh.axis_names)
    first = functools.partial(first_kept, outer, fragments)
    own = [layout.shard(plain(x), spec) for x, spec in zip(given, specs, strict=True)]
    found = jax.eval_shape(first, *own)
    out = _kept_specs(found, fragments, own[0], layout)
    run = jax.shard_map(first, mesh=automatic, in_specs=specs, out_specs=out, check_vma=False)
    if shapes:
        return run, given
    place = lambda x, spec: placed(x, NamedSharding(automatic, spec))  # noqa: E731
    return jax.jit(run), jax.tree.map(place, given, specs)


def _kept_specs(kept: Kept, fragments: Sequence[Fragment], params: PyTree, layout: Layout) -> Kept:
    """Return how the state of an outer optimizer is split inside of a replica.

    Args:
        kept: The state or its shapes, without rows; whole, or of one device as `params` are.
        fragments: The parts of the parameters.
        params: The parameters or their shapes.
        layout: The layout of the run.

    Returns:
        Arrays that mirror a parameter are split as it is, scalars are equal on all devices, and
        others have a part for each device along their first axis.
    """

    def of_each_device(leaf: Any) -> PartitionSpec:
        many = np.ndim(leaf) and layout.inside
        return PartitionSpec(layout.inside) if many else PartitionSpec()

    def part_specs(state: PyTree, fragment: Fragment) -> PyTree:
        found = mirrored(state, fragment.shapes(params), fragment.each(layout.params))
        return jax.tree.structure(state).unflatten(
            [
                of_each_device(each.leaf)
                if each.spec is None
                else PartitionSpec(*((None,) if each.rows else ()), *each.spec)
                for each in found
            ]
        )

    def all_specs(states: PyTree) -> PyTree:
        if len(fragments) == 1:
            return part_specs(states, fragments[0])
        return tuple(map(part_specs, states, fragments))

    flight = jax.tree.map(of_each_device, kept.in_flight)
    return Kept(all_specs(kept.local), all_specs(kept.shared), flight)


def outer_state_specs(train: TrainState, layout: Layout) -> OuterState:
    """Return how an outer state is split over the mesh: rows over the replicas, and inside of them.

    Args:
        train: The train state or its shapes, with rows.
        layout: The layout, with the specs of the parameters.

    Returns:
        Its `opt_state` with a `PartitionSpec` in each leaf's place.
    """
    whole: Any = PartitionSpec()
    state, params = train.opt_state, train.params
    fragments = split_fragments(params, state.report.kept.size, layout)
    own = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state.local)
    kept = _kept_specs(Kept(own.outer, state.shared, own.in_flight), fragments, params, layout)
    trees = differentiated(params), differentiated(layout.params)
    own = LocalState(
        params=layout.params,
        model_state=layout.specs(train.model_state, "model_state"),
        opt_state=state_specs(own.opt_state, layout.replicas, *trees),
        outer=kept.local,
        loss=whole,
        grad_norm=whole,
        steps=whole,
        failed=whole,
        in_flight=kept.in_flight,
    )
    report = jax.tree.map(lambda _: whole, state.report)
    return OuterState(whole, layout.within(kept.shared), report, layout.in_rows(own))


def split_fragments(params: PyTree, count: int, layout: Layout) -> tuple[Fragment, ...]:
    """Return fragments of parameters that are split inside of a replica.

    A leaf whose leading axis is split is not cut: its rows lie on different devices.

    Args:
        params: Arrays or shapes.
        count: The number of fragments.
        layout: The layout; without specs of parameters they are whole.
    """
    leading = [PartitionSpec(*spec[:1]) for spec in jax.tree.leaves(layout.params)]
    sizes = layout.mesh.shape
    split = {at for at, spec in enumerate(leading) if number_of_shards(spec, sizes) > 1}
    return fragments_of(params, count, split)


def fragments_where_they_lie(params: PyTree, count: int) -> tuple[Fragment, ...]:
    """Return the fragments of arrays, or of shapes with shardings, whatever mesh they lie on."""
    leaves = enumerate(jax.tree.leaves(params))
    split = {at for at, x in leaves if shards_of(x, first=0, end=1) > 1}
    return fragments_of(params, count, uncut=split)
