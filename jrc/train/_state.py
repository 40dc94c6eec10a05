"""The training state: what goes from step to step, and how it lies on the mesh."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrc._errors import listed
from jrc._typing import Count, PyTree, RandomKey
from jrc.dgc import dgc_specs


class TrainState(NamedTuple):
    """All that a training run carries from step to step.

    Attributes:
        step: Calls of the train step so far, int32 scalar.
        params: The parameters, the same on every replica.
        model_state: Running statistics and the like, the same on every replica; `None` without.
        opt_state: The optimizer's state. The `u` and `v` of a `DGCState` in it are each replica's
            own, one behind the other along their only axis; all else is shared.
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
    axis_name: str = "data",
) -> TrainState:
    """The state before the first step, placed on the mesh.

    Args:
        params: Parameters of one replica, any pytree of arrays. They are copied: a step that
            donates its state leaves these alone.
        tx: The optimizer.
        key: The random key of the run.
        model_state: A pytree of arrays that the loss function threads, or `None`.
        mesh: Where the replicas are; `None` is one axis over all devices.
        axis_name: The mesh axis of the replicas.

    Returns:
        A `TrainState` in which `u` and `v` of a `DGCState` are (replicas * n,) and split over the
        axis, and all else is on every device.

    Raises:
        ValueError: If the mesh has no such axis.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> state = jrc.init_state({"w": jnp.ones(3)}, optax.sgd(0.1), jax.random.key(0))
        >>> int(state.step), state.params["w"].tolist()
        (0, [1.0, 1.0, 1.0])
    """
    mesh = mesh_or_all(mesh, axis_name, "jrc.init_state")
    state = TrainState(jnp.zeros((), jnp.int32), params, model_state, tx.init(params), key)
    specs = dgc_specs(state, axis_name)
    replicas = mesh.shape[axis_name]

    def placed(state: TrainState) -> TrainState:
        return jax.tree.map(
            # A copy even where nothing changes: what is donated must not be the user's array.
            lambda x, spec: jnp.copy(x) if spec == PartitionSpec() else jnp.tile(x, replicas),
            state,
            specs,
        )

    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    return jax.jit(placed, out_shardings=shardings)(state)


def mesh_or_all(mesh: Mesh | None, axis_name: str, who: str) -> Mesh:
    """The mesh itself, or one axis over all devices; the axis must be there."""
    if mesh is None:
        return Mesh(jax.devices(), (axis_name,))
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"{who}: the mesh has the axes {listed(mesh.axis_names)}, none named {axis_name!r}. "
            "Pass axis_name= one of them."
        )
    # With explicit axes every argument would have to come with its sharding; a batch need not.
    return Mesh(mesh.devices, mesh.axis_names)


def shape_of(tree: PyTree) -> Any:
    """The shapes and dtypes of a tree."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)
