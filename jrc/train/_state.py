"""The training state, and its placement on the mesh."""

import functools
from collections import OrderedDict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrc._errors import listed
from jrc._multihost import all_or_none, differing
from jrc._rng import check_key
from jrc._specs import restricted
from jrc._text import brief
from jrc._tree import is_number, is_traced, is_typed_key, named_leaves, put
from jrc._typing import Count, PyTree, RandomKey, Transform
from jrc.dgc._internal import AxisName, check_whole, dgc_states, state_specs
from jrc.outer_optimizers import OuterOptimizer
from jrc.outer_optimizers._internal import fragment_count
from jrc.train._abstract import abstract_state, is_abstract
from jrc.train._extra_args import check_structure, differentiated, wrapped
from jrc.train._outer_check import check_inner, check_outer, check_real, check_whole_replicas
from jrc.train._outer_state import first_outer_state, outer_state_specs, split_fragments
from jrc.train._placement import copied, own_specs
from jrc.train._rows import outer_states, row_specs
from jrc.train._topology import mesh_over_all

_WHO = "jrc.init_state"


class TrainState(NamedTuple):
    """The state of a training run between two steps.

    Attributes:
        step: Number of steps so far, an int32 scalar.
        params: The parameters, equal on every replica.
        model_state: Running statistics and the like, equal on every replica; `None` without.
        opt_state: The optimizer's state. The `u` and `v` of a `DGCState` in it have a row for each
            replica; everything else is shared. With `outer=` an `OuterState`, whose `local` has a
            row for each replica; `params` and `model_state` are then those after the last round.
        key: The random key of the run. Each step folds it, and does not replace it.
    """

    step: Count
    params: PyTree
    model_state: PyTree
    opt_state: PyTree
    key: RandomKey

    def __repr__(self) -> str:
        fields = zip(self._fields, self, strict=True)
        lines = (f"  {name}={brief(value)},\n" for name, value in fields)
        return f"{type(self).__name__}(\n{''.join(lines)})"


def init_state(
    params: PyTree,
    tx: Transform,
    key: RandomKey,
    *,
    model_state: PyTree = None,
    mesh: Mesh | None = None,
    axis_name: AxisName = "data",
    outer: OuterOptimizer | None = None,
) -> TrainState:
    """Return the state before the first step, placed on the mesh.

    With several processes each of them calls this, with the same values.

    Parameters that are split over the mesh by a `NamedSharding` stay so (FSDP, tensor and expert
    parallelism), and the arrays that the optimizer keeps for each of them are split alike.

    Args:
        params: Parameters of one replica, any pytree of arrays; with `optax.lookahead` they become
            `optax.LookaheadParams`, if they are none. They are copied, so that a step
            that donates its state does not delete them. With `jax.ShapeDtypeStruct`s, or a mesh of
            `jrc.target(name).devices`, the state has shapes and shardings in the place of arrays:
            `TrainStep.memory` and `TrainStep.lower` take it.
        tx: The optimizer.
        key: The random key of the run.
        model_state: A pytree of arrays that the loss function threads, or `None`.
        mesh: The devices, with automatic or explicit axes; `None` is one axis over all devices of
            all processes.
        axis_name: The mesh axis of the replicas, or the pair `(inner, outer)` of the compression.
        outer: The outer optimizer, such as `jrc.SparseLoCo()`; `tx` is then the inner one, of each
            replica.

    Returns:
        A `TrainState` in which `u` and `v` of a `DGCState` are (replicas, *shape) and split over
        the axis, and further as their parameter is. So are all rows of an `OuterState`'s `local`.
        What is not split is replicated.

    Raises:
        TypeError: If `mesh` is not a mesh, `tx` not a transform, `key` not a key, `outer` not an
            outer optimizer, or a leaf not an array.
        ValueError: If the mesh has no such axis or no device of this process, if a transform
            before the compression in a chain has state, if there is a compression beside `outer`,
            if processes gave different values, or if parameters are split over another mesh, over
            the axis that is compressed or, with `outer`, over that of the replicas, or complex.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> state = jrc.init_state({"w": jnp.ones(3)}, optax.sgd(0.1), jax.random.key(0))
        >>> int(state.step), state.params["w"].tolist()
        (0, [1.0, 1.0, 1.0])
    """

    def here() -> tuple[Mesh, PyTree, PyTree]:
        found = mesh_or_all(mesh, axis_name, _WHO)
        check_transform(tx, _WHO)
        check_key(key, _WHO)
        check_arrays({"params": params, "model_state": model_state}, _WHO)
        check_outer(outer, _WHO)
        shapes = is_abstract((params, model_state, key), found)
        opt_state = jax.eval_shape(tx.init, params) if shapes else tx.init(params)
        _check_first(opt_state)
        stepped = wrapped(params, opt_state)
        check_structure(stepped, opt_state, _WHO)
        if outer is not None:
            check_real(params, _WHO)
            check_inner(opt_state, _WHO)
            specs = own_specs(stepped, found, _WHO, "params")
            check_whole_replicas(specs, names_of(axis_name), _WHO)
            model_specs = own_specs(model_state, found, _WHO, "model_state")
            check_whole_replicas(model_specs, names_of(axis_name), _WHO, "model_state")
            split_fragments(stepped, specs, fragment_count(outer), found, _WHO)
        return found, stepped, opt_state

    mesh, params, opt_state = all_or_none(here, _WHO) if _spans_processes(mesh) else here()
    names = names_of(axis_name)
    state = TrainState(jnp.zeros((), jnp.int32), params, model_state, opt_state, key)
    abstract = is_abstract(state, mesh)
    if mesh.is_multi_process and not abstract:
        _check_same(state)
    if outer is not None:
        first = first_outer_state(
            outer, params, model_state, opt_state, mesh, names, _WHO, abstract
        )
        state = state._replace(opt_state=first)
    if abstract:
        specs, rows = specs_of_state(state, mesh, names, _WHO), row_specs(state, names[0])
        return abstract_state(state, specs, rows, mesh, mesh.shape[names[0]])
    return _placed(state, mesh, names)


def _placed(state: TrainState, mesh: Mesh, names: tuple[str, ...]) -> TrainState:
    """Return the state on the mesh, split as its parameters are, u and v with a row per replica."""
    axis = names[0]
    specs = specs_of_state(state, mesh, names, _WHO)
    rows = row_specs(state, axis)

    # Rows are made with automatic axes, whatever those of the run are.
    automatic = Mesh(mesh.devices, mesh.axis_names)

    def placed(x: Any, spec: PartitionSpec, row: PartitionSpec) -> jax.Array:
        if row == PartitionSpec():
            return copied(x, NamedSharding(mesh, spec))
        # Of one replica first, so that no device ever holds more than its own shard of a row.
        inside = restricted(spec, set(mesh.axis_names) - {axis})
        one = copied(x, NamedSharding(automatic, inside))
        tile = functools.partial(jnp.tile, reps=(mesh.shape[axis], *(1 for _ in x.shape[1:])))
        rows = jax.jit(tile, out_shardings=NamedSharding(automatic, spec))(one)
        return put(rows, NamedSharding(mesh, spec))

    return jax.tree.map(placed, state, specs, rows)


def specs_of_state(state: TrainState, mesh: Mesh, names: tuple[str, ...], who: str) -> TrainState:
    """Return how a state is split: parameters as they are, the optimizer's arrays like them.

    Args:
        state: The state, or its shapes with shardings.
        mesh: The mesh of the run.
        names: The axes of the step, that of the replicas first.
        who: The public function, for errors.

    Returns:
        The state with a `PartitionSpec` in each leaf's place.

    Raises:
        ValueError: If parameters are split over another mesh, over a compressed axis, or with an
            outer optimizer over an axis of the step.
    """
    params = own_specs(state.params, mesh, who, "params")
    model_state = own_specs(state.model_state, mesh, who, "model_state")
    whole: Any = PartitionSpec()
    if outer_states(state):
        check_whole_replicas(params, names, who)
        given = state.params, params, model_state, mesh, names
        return TrainState(
            whole, params, model_state, outer_state_specs(state.opt_state, *given), whole
        )
    if dgc_states(state.opt_state):
        check_whole(params, names[0], who)
    trees = differentiated(state.params), differentiated(params)
    opt_state = state_specs(state.opt_state, names[0], *trees)
    return TrainState(whole, params, model_state, opt_state, whole)


def _spans_processes(mesh: object) -> bool:
    """Whether several processes have devices in the mesh; equal on all processes."""
    devices = mesh.devices.flat if isinstance(mesh, Mesh) else jax.devices()
    return len({device.process_index for device in devices}) > 1


def is_transform(tx: Any) -> bool:
    """Return whether this is an optax transform, or has the methods of one."""
    return callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))


def check_transform(tx: Any, who: str) -> None:
    """Raise unless this is an optax transform."""
    if not is_transform(tx):
        raise TypeError(
            f"{who}: tx must be an optax transform, got {type(tx).__name__} {tx!r}. Write "
            "tx=optax.adam(0.01)."
        )


def check_arrays(tree: PyTree, who: str) -> None:
    """Raise unless all leaves are arrays."""
    for name, leaf in named_leaves(tree):
        if not (is_number(leaf) or is_traced(leaf)):
            raise TypeError(
                f"{who}: every leaf of params and model_state must be an array, got "
                f"{type(leaf).__name__} {leaf!r} at {name!r}. Bind other values to the loss "
                "function."
            )


def kind_of(leaf: Any) -> str:
    """Return the type of a leaf as text: `float32[4, 2]`, `None`, `str`."""
    if not (is_number(leaf) or is_traced(leaf)):
        return "None" if leaf is None else type(leaf).__name__
    dtype = leaf.dtype if is_typed_key(leaf) else jnp.result_type(leaf)
    return f"{dtype}{list(jnp.shape(leaf))}"


def _check_same(state: TrainState) -> None:
    """Raise if processes start from different parameters, which no step would make equal."""
    given = {"params": state.params, "model_state": state.model_state, "key": state.key}
    if names := differing(named_leaves(given)):
        raise ValueError(
            f"{_WHO}: params, model_state and key must be equal on all {jax.process_count()} "
            f"processes, got different {listed(names)}. Draw them from the same key on every "
            "process."
        )


def names_of(axis_name: AxisName) -> tuple[str, ...]:
    """Return the axes over which a batch is split; u and v differ along the first."""
    return (axis_name,) if isinstance(axis_name, str) else axis_name[::-1]


def check_axis_name(axis_name: Any, who: str) -> None:
    """Raise unless this is the name of an axis or a pair of two names."""
    pair = isinstance(axis_name, tuple) and len(axis_name) == 2 and len(set(axis_name)) == 2
    if not all(isinstance(name, str) for name in (axis_name if pair else (axis_name,))):
        raise TypeError(
            f"{who}: axis_name must be the name of a mesh axis, or a pair (inner, outer) of two, "
            f"got {axis_name!r}. Write axis_name='data'."
        )


def mesh_or_all(mesh: Mesh | None, axis_name: AxisName, who: str) -> Mesh:
    """Return the mesh, or one axis over all devices, or raise if an axis is missing."""
    check_axis_name(axis_name, who)
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(
            f"{who}: mesh must be a jax.sharding.Mesh or None, got {type(mesh).__name__}. "
            f"Write jax.sharding.Mesh(devices, ({axis_name!r},))."
        )
    if mesh is None and not isinstance(axis_name, str):
        raise ValueError(
            f"{who}: mesh must be given with a pair of axes, which depend on the hosts, got "
            f"axis_name={axis_name!r} alone. Pass "
            f"mesh=jax.make_mesh((hosts, devices), {names_of(axis_name)!r})."
        )
    if mesh is None:
        return mesh_over_all(str(axis_name))
    for name in names_of(axis_name):
        if name not in mesh.axis_names:
            raise ValueError(
                f"{who}: axis_name must be an axis of the mesh, got {name!r}. The axes are "
                f"{listed(mesh.axis_names)}: pass one of them."
            )
    if not mesh.local_devices:
        raise ValueError(
            f"{who}: mesh must have devices of every process, got "
            f"{listed(map(str, mesh.devices.flat))}, of which process {jax.process_index()} has "
            "none. Build the mesh of jax.devices(), or leave it out."
        )
    return mesh


def _check_first(opt_state: PyTree) -> None:
    """Raise if a transform before the compression stores local gradients in its state."""
    chains = jax.tree.leaves(opt_state, is_leaf=_is_chain)
    for chain in map(_parts_of_chain, filter(_is_chain, chains)):
        at = next(i for i, part in enumerate(chain) if dgc_states(part))
        for part in chain[:at]:
            if _has_floats(part):
                raise ValueError(
                    f"{_WHO}: a transform before the compression must have no state of its own, "
                    f"which would differ between replicas, got {type(part).__name__}. Chain it "
                    "behind jrc.scale_by_dgc."
                )
        for part in chain:
            _check_first(part)


def _has_floats(state: PyTree) -> bool:
    """Whether a state has floats besides injected hyperparameters."""
    leaves = jax.tree.leaves(state, is_leaf=_is_injected)
    return any(
        _has_floats(x.inner_state) if _is_injected(x) else jnp.issubdtype(x.dtype, jnp.inexact)
        for x in leaves
    )


def _is_injected(node: Any) -> bool:
    return hasattr(node, "hyperparams") and hasattr(node, "inner_state")


def _is_chain(node: Any) -> bool:
    return any(dgc_states(part) for part in _parts_of_chain(node))


def _parts_of_chain(node: Any) -> tuple[Any, ...]:
    """Return the states of an `optax.chain` or an `optax.named_chain` in call order."""
    if isinstance(node, OrderedDict):
        return tuple(node.values())
    return node if type(node) is tuple else ()
