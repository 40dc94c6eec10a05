"""The training state: what goes from step to step, and how it lies on the mesh."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrc._errors import listed
from jrc._multihost import all_or_none, differing
from jrc._rng import check_key
from jrc._tree import is_number, is_traced, is_typed_key, named_leaves
from jrc._typing import Count, PyTree, RandomKey
from jrc.dgc import AxisName, dgc_specs, dgc_states

_WHO = "jrc.init_state"


class TrainState(NamedTuple):
    """All that a training run carries from step to step.

    Attributes:
        step: Calls of the train step so far, int32 scalar.
        params: The parameters, the same on every replica.
        model_state: Running statistics and the like, the same on every replica; `None` without.
        opt_state: The optimizer's state. The `u` and `v` of a `DGCState` in it are each replica's
            own, a row each; all else is shared.
        key: The random key of the run; each step folds it, none replaces it.
    """

    step: Count
    params: PyTree
    model_state: PyTree
    opt_state: PyTree
    key: RandomKey


def init_state(
    params: PyTree,
    tx: optax.GradientTransformation,
    key: RandomKey,
    *,
    model_state: PyTree = None,
    mesh: Mesh | None = None,
    axis_name: AxisName = "data",
) -> TrainState:
    """The state before the first step, placed on the mesh.

    With several processes each of them calls this, with the same values.

    Args:
        params: Parameters of one replica, any pytree of arrays. They are copied: a step that
            donates its state leaves these alone.
        tx: The optimizer.
        key: The random key of the run.
        model_state: A pytree of arrays that the loss function threads, or `None`.
        mesh: Where the replicas are; `None` is one axis over all devices, of all processes too.
        axis_name: The mesh axis of the replicas, or the pair `(inner, outer)` of the compression.

    Returns:
        A `TrainState` in which `u` and `v` of a `DGCState` are (replicas, n) and split over the
        axis, and all else is on every device.

    Raises:
        TypeError: If `mesh` is no mesh, `tx` no transform, `key` no key, or a leaf no array.
        ValueError: If the mesh has no such axis or no device of this process, if a transform that
            stands before the compression in a chain has state, or if processes gave different
            values.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> state = jrc.init_state({"w": jnp.ones(3)}, optax.sgd(0.1), jax.random.key(0))
        >>> int(state.step), state.params["w"].tolist()
        (0, [1.0, 1.0, 1.0])
    """

    def here() -> tuple[Mesh, PyTree]:
        found = mesh_or_all(mesh, axis_name, _WHO)
        check_transform(tx, _WHO)
        check_key(key, _WHO)
        check_arrays({"params": params, "model_state": model_state}, _WHO)
        opt_state = tx.init(params)
        _check_first(opt_state)
        return found, opt_state

    mesh, opt_state = all_or_none(here, _WHO) if _spans_processes(mesh) else here()
    state = TrainState(jnp.zeros((), jnp.int32), params, model_state, opt_state, key)
    if mesh.is_multi_process:
        _check_same(state)
    shared = NamedSharding(mesh, PartitionSpec())
    replicas = mesh.shape[names_of(axis_name)[0]]

    def placed(x: Any, spec: PartitionSpec) -> jax.Array:
        # An explicit dtype: a weak one would change at the first step and compile it twice. A copy
        # even where nothing changes: what a step donates must not be the user's array.
        x = jnp.copy(x) if is_typed_key(x) else jnp.array(x, jnp.result_type(x))
        x = _on_all(x, shared)
        if spec == PartitionSpec():
            return x
        tile = functools.partial(jnp.tile, reps=(replicas, *(1 for _ in x.shape[1:])))
        return jax.jit(tile, out_shardings=NamedSharding(mesh, spec))(x)

    return jax.tree.map(placed, state, dgc_specs(state, axis_name))


def _spans_processes(mesh: object) -> bool:
    """Whether several processes take part: the same answer on those without a device in it too."""
    devices = mesh.devices.flat if isinstance(mesh, Mesh) else jax.devices()
    return len({device.process_index for device in devices}) > 1


def check_transform(tx: Any, who: str) -> None:
    """Refuse what is no optimizer, before it fails without its name."""
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise TypeError(
            f"{who}: tx is an optax transform; got {type(tx).__name__} {tx!r}. Write "
            "tx=optax.adam(0.01)."
        )


def check_arrays(tree: PyTree, who: str) -> None:
    """Refuse leaves that are no arrays."""
    for name, leaf in named_leaves(tree):
        if not (is_number(leaf) or is_traced(leaf)):
            raise TypeError(
                f"{who}: parameters and model states hold arrays; leaf {name!r} is "
                f"{type(leaf).__name__} {leaf!r}. Bind what is none to the loss function."
            )


def kind_of(leaf: Any) -> str:
    """What a leaf is, for a sentence: `float32[4, 2]`, `None`, `str`."""
    if not (is_number(leaf) or is_traced(leaf)):
        return "None" if leaf is None else type(leaf).__name__
    dtype = leaf.dtype if is_typed_key(leaf) else jnp.result_type(leaf)
    return f"{dtype}{list(jnp.shape(leaf))}"


def _on_all(x: jax.Array, shared: NamedSharding) -> jax.Array:
    """A copy on every device of the mesh; of what lies on this process, on its devices."""
    traced = isinstance(x, jax.core.Tracer)
    if traced or not shared.mesh.is_multi_process or not x.is_fully_addressable:
        return jax.device_put(x, shared)
    parts = [jax.device_put(x, device) for device in shared.mesh.local_devices]
    return jax.make_array_from_single_device_arrays(x.shape, shared, parts)


def _check_same(state: TrainState) -> None:
    """Processes that start from different parameters would never come together."""
    given = {"params": state.params, "model_state": state.model_state, "key": state.key}
    if names := differing(named_leaves(given)):
        raise ValueError(
            f"jrc.init_state: all {jax.process_count()} processes start from the same values; "
            f"these differ: {listed(names)}. Draw them from the same key on every process."
        )


def names_of(axis_name: AxisName) -> tuple[str, ...]:
    """The axes over which a batch is split; along the first of them compression states differ."""
    return (axis_name,) if isinstance(axis_name, str) else axis_name[::-1]


def mesh_or_all(mesh: Mesh | None, axis_name: AxisName, who: str) -> Mesh:
    """The mesh itself, or one axis over all devices; the axes must be there."""
    pair = isinstance(axis_name, tuple) and len(axis_name) == 2 and len(set(axis_name)) == 2
    if not all(isinstance(name, str) for name in (axis_name if pair else (axis_name,))):
        raise TypeError(
            f"{who}: axis_name is the name of a mesh axis, or a pair (inner, outer) of two; got "
            f"{axis_name!r}. Write axis_name='data'."
        )
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(
            f"{who}: mesh is a jax.sharding.Mesh or None; got {type(mesh).__name__}. "
            f"Write jax.sharding.Mesh(devices, ({axis_name!r},))."
        )
    if mesh is None and pair:
        raise ValueError(
            f"{who}: only you know which devices share a host: for axis_name={axis_name!r} pass "
            f"mesh=jax.make_mesh((hosts, devices), {names_of(axis_name)!r})."
        )
    if mesh is None:
        return Mesh(jax.devices(), (axis_name,))
    for name in names_of(axis_name):
        if name not in mesh.axis_names:
            raise ValueError(
                f"{who}: the mesh has the axes {listed(mesh.axis_names)}, none named {name!r}. "
                "Pass axis_name= one of them."
            )
    if not mesh.local_devices:
        raise ValueError(
            f"{who}: every process that calls it has devices in the mesh; process "
            f"{jax.process_index()} has none in {listed(map(str, mesh.devices.flat))}. "
            "Build the mesh of jax.devices(), or leave it out."
        )
    # With explicit axes every argument would have to come with its sharding; a batch need not.
    return Mesh(mesh.devices, mesh.axis_names)


def _check_first(opt_state: PyTree) -> None:
    """What stands before the compression sees local gradients and may not remember them."""
    chains = jax.tree.leaves(opt_state, is_leaf=_is_chain)
    for chain in filter(_is_chain, chains):
        at = next(i for i, part in enumerate(chain) if dgc_states(part))
        for part in chain[:at]:
            if _remembers(part):
                raise ValueError(
                    "jrc.init_state: what is chained before the compression has no state of its "
                    f"own, because every replica would have another; got {type(part).__name__}. "
                    "Chain it behind jrc.scale_by_dgc."
                )
        for part in chain:
            _check_first(part)


def _remembers(state: PyTree) -> bool:
    """Whether a state has floats that gradients went into; injected hyperparameters are not."""
    leaves = jax.tree.leaves(state, is_leaf=_is_injected)
    return any(
        _remembers(x.inner_state) if _is_injected(x) else jnp.issubdtype(x.dtype, jnp.inexact)
        for x in leaves
    )


def _is_injected(node: Any) -> bool:
    return hasattr(node, "hyperparams") and hasattr(node, "inner_state")


def _is_chain(node: Any) -> bool:
    return type(node) is tuple and any(dgc_states(part) for part in node)
