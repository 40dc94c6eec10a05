"""What a train step is given, checked: batch, state, and what the loss function returns."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from jrc._errors import listed
from jrc._multihost import differing
from jrc._rng import check_key
from jrc._tree import aval_of, is_array, is_number, is_traced, is_typed_key, named_leaves
from jrc._typing import PyTree, Scalar
from jrc.dgc import AxisName, dgc_specs, dgc_states
from jrc.train._check_axis import check_axis
from jrc.train._state import TrainState, check_arrays, kind_of, names_of

_WHO = "jrc.make_train_step"


def check_batch(batch: PyTree, parts: int, words: str) -> None:
    """Every leaf's leading axis must split into equal parts."""
    for name, leaf in named_leaves(batch):
        name = name or "(the batch itself)"
        if not (is_array(leaf) or is_traced(leaf)):
            raise ValueError(
                f"jrc.make_train_step: a batch holds arrays, with the examples along the leading "
                f"axis; leaf {name!r} is {type(leaf).__name__} {leaf!r}. Make it one with "
                "jnp.asarray."
            )
        if jnp.ndim(leaf) == 0 or jnp.shape(leaf)[0] % parts or jnp.shape(leaf)[0] == 0:
            raise ValueError(
                f"jrc.make_train_step: the leading axis of every batch leaf is a multiple of "
                f"{words} = {parts}; leaf {name!r} has shape "
                f"{list(jnp.shape(leaf))}. Drop the rest of the batch, or use fewer parts."
            )


def check_batch_of_processes(batch: PyTree, axes: tuple[str, ...]) -> None:
    """What each process has alone is the whole batch to JAX, of which it would take its share."""
    if names := differing(named_leaves(batch)):
        raise ValueError(
            "jrc.make_train_step: arrays that a process has for itself are the whole batch, the "
            f"same on every process; these differ: {listed(names)}. Join the processes' own parts, "
            "of equal sizes: jax.make_array_from_process_local_data("
            f"NamedSharding(mesh, PartitionSpec({axes!r})), part)."
        )


def check_form(state: Any) -> None:
    """A `TrainState` whose arrays are there."""
    if not isinstance(state, TrainState):
        raise TypeError(
            f"jrc.make_train_step: a step takes the TrainState of jrc.init_state; got "
            f"{type(state).__name__}. Write state = jrc.init_state(params, tx, key)."
        )
    if _is_placed(state.step) and state.step.is_deleted():
        raise ValueError(
            "jrc.make_train_step: this state was donated to a step before, and is gone. Go on with "
            "the state that it returned, or pass donate=False."
        )


def check_devices(state: TrainState, mesh: Mesh) -> None:
    """A state lies where the step runs; JAX names an argument of the step that nobody wrote."""
    step = state.step
    placed = _is_placed(step) and step.committed
    if placed and step.sharding.device_set != set(mesh.devices.flat):
        raise ValueError(
            f"jrc.make_train_step: the step runs on {mesh.size} devices; the state lies on "
            f"{len(step.sharding.device_set)}, not the same ones. Give jrc.init_state and "
            "jrc.make_train_step the same mesh."
        )


def _is_placed(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)


def check_state(
    tx: optax.GradientTransformation, state: TrainState, axis: AxisName, mesh: Mesh
) -> None:
    """The state was built for this optimizer, these replicas and this axis."""
    check_arrays({"params": state.params, "model_state": state.model_state}, _WHO)
    check_key(state.key, _WHO)
    for name, leaf in named_leaves(state.params):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise ValueError(
                f"jrc.make_train_step: parameters are floating arrays, for they are "
                f"differentiated; leaf {name!r} is {kind_of(leaf)}. Keep it in the model state."
            )
    params = jax.tree.map(aval_of, state.params)
    expected = jax.eval_shape(tx.init, params)
    if jax.tree.structure(expected) != jax.tree.structure(state.opt_state):
        raise ValueError(
            "jrc.make_train_step: the state was built for another optimizer than tx: its "
            f"opt_state is {jax.tree.structure(state.opt_state)}. Build it with "
            "jrc.init_state(params, tx, key)."
        )
    if not dgc_states(expected):
        return
    names = names_of(axis)
    replicas = mesh.shape[names[0]]
    specs = jax.tree.leaves(dgc_specs(expected, axis))
    leaves = zip(jax.tree.leaves(expected), jax.tree.leaves(state.opt_state), specs, strict=True)
    for want, got, spec in leaves:
        if spec != PartitionSpec() and got.size != want.size * replicas:
            raise ValueError(
                f"jrc.make_train_step: the step has {replicas} replicas; the compression in the "
                f"state was built for {got.size / want.size:g}. Give jrc.init_state and "
                "jrc.make_train_step the same mesh."
            )
    if any(mesh.shape[name] > 1 for name in names):
        check_axis(tx, params, axis, mesh)


def pair_of(out: Any, name: str, stateful: bool = False) -> tuple[Any, Any]:
    """The two things that a loss function returned, or an error that says what they are."""
    if isinstance(out, tuple) and len(out) == 2:
        return out
    form = "(loss, (model_state, aux))" if stateful else "loss or (loss, aux)"
    several = isinstance(out, tuple | list)
    what = f"a {type(out).__name__} of {len(out)}" if several else kind_of(out)
    raise ValueError(
        f"jrc.make_train_step: the loss function returns {form}; `{name}` returned {what}. Return "
        "that pair as a tuple."
    )


def check_call(fn: Any, args: tuple[Any, ...], name: str) -> None:
    """The loss function takes what it is given; where it does not say, its call will."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        given = "params, batch, key" if len(args) == 3 else "params, model_state, batch, key"
        raise TypeError(
            f"jrc.make_train_step: the loss function is called with ({given}); `{name}` does not "
            f"take them: {error}. With a model state in jrc.init_state there are four, else three; "
            "bind what else it takes with functools.partial."
        ) from error


def check_model_state(old: PyTree, new: PyTree, name: str) -> None:
    """The model state goes round: what comes out is like what went in."""

    def kinds(tree: PyTree) -> list[tuple[str, str]]:
        pairs = named_leaves(tree)
        return [(k, kind_of(x)) for k, x in pairs]

    if kinds(old) != kinds(new):
        differ = [pair for pair in zip(kinds(old), kinds(new), strict=False) if pair[0] != pair[1]]
        what = "leaves came or went"
        if differ:
            (leaf, kind), (name_now, kind_now) = differ[0]
            now = kind_now if name_now == leaf else f"leaf {name_now!r}"
            what = f"leaf {leaf!r}, {kind}, became {now}"
        raise ValueError(
            f"jrc.make_train_step: the model state keeps its leaves, shapes and dtypes; in "
            f"`{name}` {what}. Return it like the one that came in."
        )


def check_aux(aux: PyTree, name: str) -> None:
    """Only numbers can be put together over replicas."""
    for leaf_name, leaf in named_leaves(aux):
        if not (is_array(leaf) or isinstance(leaf, int | float)) or is_typed_key(leaf):
            where = leaf_name or "(aux itself)"
            raise ValueError(
                f"jrc.make_train_step: aux holds numbers, which are put together over replicas; "
                f"in `{name}` leaf {where!r} is {kind_of(leaf)}. Take it out of aux."
            )


def checked_loss(loss: Any, name: str) -> Scalar:
    """The loss, a floating scalar."""
    if (
        not is_number(loss)
        or jnp.shape(loss) != ()
        or not jnp.issubdtype(jnp.result_type(loss), jnp.floating)
    ):
        raise ValueError(
            f"jrc.make_train_step: the loss is a floating scalar, the mean over the batch; "
            f"`{name}` returned {kind_of(loss)}. "
            "Take its mean, and return what else you need as (loss, aux)."
        )
    return loss
