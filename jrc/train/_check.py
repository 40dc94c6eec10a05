"""Checks of a train step's state, and of the loss function's result."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrc._rng import check_key
from jrc._tree import (
    aval_of,
    is_array,
    is_number,
    is_typed_key,
    named_leaves,
    tree_difference,
)
from jrc._typing import PyTree, Scalar, Transform
from jrc.dgc._internal import AxisName, dgc_states, without_axes
from jrc.outer_optimizers import OuterOptimizer
from jrc.train._check_axis import check_axis
from jrc.train._extra_args import check_structure
from jrc.train._outer_check import check_inner
from jrc.train._outer_state import first_outer_state
from jrc.train._placement import same_types
from jrc.train._rows import outer_states, row_specs
from jrc.train._state import TrainState, check_arrays, kind_of, names_of

_WHO = "jrc.make_train_step"


def check_form(state: Any) -> None:
    """Raise unless this is a `TrainState` whose arrays were not donated."""
    if not isinstance(state, TrainState):
        raise TypeError(
            f"{_WHO}: state must be a TrainState of jrc.init_state, got {type(state).__name__}. "
            "Write state = jrc.init_state(params, tx, key)."
        )
    if _is_placed(state.step) and state.step.is_deleted():
        raise ValueError(
            f"{_WHO}: state must not be donated, got one whose arrays an earlier step has "
            "deleted. Use the state that it returned, or pass donate=False."
        )


def check_devices(state: TrainState, mesh: Mesh) -> None:
    """Raise unless the state lies on the devices of the mesh."""
    step = state.step
    placed = _is_placed(step) and step.committed
    if placed and step.sharding.device_set != set(mesh.devices.flat):
        raise ValueError(
            f"{_WHO}: state must lie on the {mesh.size} devices of the step, got one on "
            f"{len(step.sharding.device_set)}, not the same ones. Give jrc.init_state and "
            "jrc.make_train_step the same mesh."
        )
    shared = NamedSharding(mesh, PartitionSpec())
    if placed and mesh.size > 1 and not same_types(step.sharding, shared):
        raise ValueError(
            f"{_WHO}: state must lie on the mesh of the step, whose axis_types are "
            f"{mesh.axis_types}, got one on {step.sharding}. Give jrc.init_state and "
            "jrc.make_train_step the same mesh."
        )


def _is_placed(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)


def check_state(tx: Transform, state: TrainState, axis: AxisName, mesh: Mesh) -> None:
    """Raise unless the state was built for this optimizer, these replicas and this axis."""
    check_leaves(state)
    params = jax.tree.map(_without_sharding, state.params)
    expected = jax.eval_shape(tx.init, params)
    if difference := tree_difference(without_axes(expected), without_axes(state.opt_state)):
        raise ValueError(
            f"{_WHO}: state must be built for the optimizer tx, got one with another opt_state: "
            f"{difference}. Build it with jrc.init_state(params, tx, key)."
        )
    check_structure(params, expected, _WHO)
    if not dgc_states(expected):
        return
    check_rows(expected, state, axis, mesh)
    if any(mesh.shape[name] > 1 for name in names_of(axis)):
        check_axis(tx, params, axis, mesh)


def check_outer_state(
    outer: OuterOptimizer, tx: Transform, state: Any, axis: AxisName, mesh: Mesh
) -> None:
    """Raise unless the state was built for these optimizers and replicas."""
    check_leaves(state)
    params = jax.tree.map(aval_of, state.params)
    inner = jax.eval_shape(tx.init, params)
    check_inner(inner, _WHO)
    check_structure(params, inner, _WHO)
    given = state.params, state.model_state, inner
    expected = first_outer_state(outer, *given, mesh, names_of(axis), _WHO, shapes=True)
    if difference := tree_difference(expected, state.opt_state):
        raise ValueError(
            f"{_WHO}: state must be built for tx and outer={outer!r}, got one with another "
            f"opt_state: {difference}. Build it with jrc.init_state(params, tx, key, outer=outer)."
        )
    check_rows(expected, state, axis, mesh)


def check_leaves(state: TrainState) -> None:
    """Raise unless parameters are floating arrays, and the key is one."""
    check_arrays({"params": state.params, "model_state": state.model_state}, _WHO)
    check_key(state.key, _WHO)
    for name, leaf in named_leaves(state.params):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise ValueError(
                f"{_WHO}: every leaf of params must be floating, because it is differentiated, got "
                f"{kind_of(leaf)} at {name!r}. Keep it in the model state."
            )


def check_rows(expected: PyTree, state: TrainState, axis: AxisName, mesh: Mesh) -> None:
    """Raise unless what differs between replicas has a row for each of them."""
    replicas = mesh.shape[names_of(axis)[0]]
    specs = jax.tree.leaves(row_specs(expected, axis))
    what = "rows" if outer_states(expected) else "compression"
    leaves = zip(jax.tree.leaves(expected), jax.tree.leaves(state.opt_state), specs, strict=True)
    for want, got, spec in leaves:
        if spec != PartitionSpec() and got.size != want.size * replicas:
            if got.shape[:1] == (replicas,):
                raise ValueError(
                    f"{_WHO}: state must fit the split of replicas on this mesh, got rows of "
                    f"{list(got.shape[1:])} for {want.size} entries. Build it with jrc.init_state "
                    "on this mesh, or take it over by jrc.reshard(..., mesh=mesh, outer=outer)."
                )
            raise ValueError(
                f"{_WHO}: state must be built for the {replicas} replicas of the step, got one "
                f"with {what} for {got.size / want.size:g}. Give jrc.init_state and "
                "jrc.make_train_step the same mesh; without one, via='jit' takes one device, and "
                "jrc.init_state all of them."
            )


def _without_sharding(leaf: Any) -> jax.ShapeDtypeStruct:
    aval = aval_of(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def pair_of(out: Any, name: str, stateful: bool = False) -> tuple[Any, Any]:
    """Return the pair that a loss function returned, or raise if it is none."""
    if isinstance(out, tuple) and len(out) == 2:
        return out
    form = "(loss, (model_state, aux))" if stateful else "loss or (loss, aux)"
    is_sequence = isinstance(out, tuple | list)
    kind = f"a {type(out).__name__} of {len(out)}" if is_sequence else kind_of(out)
    raise ValueError(
        f"{_WHO}: loss_fn must return {form}, got {kind} from `{name}`. Return that pair as a "
        "tuple."
    )


def check_call(fn: Any, args: tuple[Any, ...], name: str) -> None:
    """Raise unless the loss function takes these arguments, as far as its signature is known."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        given = "params, batch, key" if len(args) == 3 else "params, model_state, batch, key"
        raise TypeError(
            f"{_WHO}: loss_fn must take ({given}), got `{name}`, which does not: {error}. There "
            "are four arguments with a model state in jrc.init_state, else three; bind others with "
            "functools.partial."
        ) from error


def check_model_state(old: PyTree, new: PyTree, name: str) -> None:
    """Raise unless the new model state has the leaves, shapes and dtypes of the old one."""

    def kinds(tree: PyTree) -> list[tuple[str, str]]:
        pairs = named_leaves(tree)
        return [(k, kind_of(x)) for k, x in pairs]

    if kinds(old) != kinds(new):
        differ = [pair for pair in zip(kinds(old), kinds(new), strict=False) if pair[0] != pair[1]]
        change = "one with more or fewer leaves"
        if differ:
            (leaf, kind), (name_now, kind_now) = differ[0]
            now = kind_now if name_now == leaf else f"leaf {name_now!r}"
            change = f"{now} for leaf {leaf!r}, {kind},"
        raise ValueError(
            f"{_WHO}: the new model state must have the leaves, shapes and dtypes of the old one, "
            f"got {change} from `{name}`. Return it like the argument."
        )


def check_aux(aux: PyTree, name: str) -> None:
    """Raise unless aux holds numbers, which are averaged or added over replicas."""
    for leaf_name, leaf in named_leaves(aux):
        if not (is_array(leaf) or isinstance(leaf, int | float)) or is_typed_key(leaf):
            where = leaf_name or "(aux itself)"
            raise ValueError(
                f"{_WHO}: aux must hold numbers, which are averaged or added over replicas, got "
                f"{kind_of(leaf)} at {where!r} from `{name}`. Take it out of aux."
            )


def checked_loss(loss: Any, name: str) -> Scalar:
    """Return the loss, or raise unless it is a floating scalar."""
    if (
        not is_number(loss)
        or jnp.shape(loss) != ()
        or not jnp.issubdtype(jnp.result_type(loss), jnp.floating)
    ):
        raise ValueError(
            f"{_WHO}: loss_fn must return a floating scalar, the mean over the batch, got "
            f"{kind_of(loss)} from `{name}`. Take its mean, and return other values as (loss, aux)."
        )
    return loss
