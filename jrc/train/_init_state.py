"""The state before the first step, placed on the mesh."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrc._errors import listed, public
from jrc._layout import Layout, copied
from jrc._mesh_axes import AxisName
from jrc._multihost import all_or_none, differing
from jrc._rng import check_key
from jrc._targets import is_compile_only
from jrc._tree import is_typed_key, named_leaves, put, with_static
from jrc._typing import PyTree, RandomKey, Transform
from jrc.outer_optimizers import OuterOptimizer
from jrc.train._arguments import check_arrays, check_outer, check_transform
from jrc.train._optax import check_structure, wrapped
from jrc.train._state import TrainState
from jrc.train._synchronisation import Synchronisation, synchronisation_of


@public("jrc.init_state")
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
            `optax.LookaheadParams`, if they are none. Functions, texts and Python's own numbers
            and bools among them are not trained, and no leaves of the state: `loss_fn` gets them
            as they are. Parameters are copied, so that a step
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
    given, params = params, with_static(params)

    def here() -> tuple[Synchronisation, Layout, PyTree, PyTree]:
        layout = Layout.of(mesh, axis_name)
        check_transform(tx)
        check_key(key)
        check_arrays({"params": params, "model_state": model_state})
        if jax.tree.leaves(given) and not jax.tree.leaves(params):
            raise ValueError(
                "params must have an array, which is trained, got functions, texts or numbers of "
                "Python alone. Write jnp.asarray(1.0) for a number."
            )
        check_outer(outer)
        shapes = _is_abstract((params, model_state, key), layout.mesh)
        opt_state = jax.eval_shape(tx.init, params) if shapes else tx.init(params)
        stepped = wrapped(params, opt_state)
        check_structure(stepped, opt_state)
        layout, way = layout.with_params(stepped), synchronisation_of(tx, outer, opt_state)
        way.check(stepped, model_state, opt_state, layout)
        return way, layout, stepped, opt_state

    way, layout, params, opt_state = all_or_none(here) if _spans_processes(mesh) else here()
    state = TrainState(jnp.zeros((), jnp.int32), params, model_state, opt_state, key)
    abstract = _is_abstract(state, layout.mesh)
    if layout.mesh.is_multi_process and not abstract:
        _check_same(state)
    first = way.init(params, model_state, opt_state, layout, shapes=abstract)
    state = state._replace(opt_state=first)
    specs, rows = way.specs(state, layout), way.row_specs(state, layout)
    place = functools.partial(_shape if abstract else _placed, layout)
    return jax.tree.map(place, state, specs, rows)


def _is_abstract(tree: PyTree, mesh: Mesh) -> bool:
    """Return whether a state with these leaves on this mesh can have no arrays."""
    shapes = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))
    return shapes or is_compile_only(mesh.devices.flat[0])


def _shape(layout: Layout, x: Any, spec: PartitionSpec, row: PartitionSpec) -> Any:
    """Return the shape of a leaf on the mesh, with a row for each replica if it has rows."""
    shape = (layout.rows * x.shape[0], *x.shape[1:]) if row else jnp.shape(x)
    dtype = x.dtype if is_typed_key(x) else jnp.result_type(x)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(layout.mesh, spec))


def _placed(layout: Layout, x: Any, spec: PartitionSpec, row: PartitionSpec) -> jax.Array:
    """Return a leaf of one replica on the mesh, with a row for each replica if it has rows."""
    sharding = NamedSharding(layout.mesh, spec)
    if not row:
        return copied(x, sharding)
    # Rows are made with automatic axes, whatever those of the run are. Of one replica first, so
    # that no device ever holds more than its own shard of a row.
    automatic = Mesh(layout.mesh.devices, layout.mesh.axis_names)
    one = copied(x, NamedSharding(automatic, layout.within(spec)))
    tile = functools.partial(jnp.tile, reps=(layout.rows, *(1 for _ in x.shape[1:])))
    rows = jax.jit(tile, out_shardings=NamedSharding(automatic, spec))(one)
    return put(rows, sharding)


def _spans_processes(mesh: object) -> bool:
    """Whether several processes have devices in the mesh; equal on all processes."""
    devices = mesh.devices.flat if isinstance(mesh, Mesh) else jax.devices()
    return len({device.process_index for device in devices}) > 1


def _check_same(state: TrainState) -> None:
    """Raise if processes start from different parameters, which no step would make equal."""
    given = {"params": state.params, "model_state": state.model_state, "key": state.key}
    if names := differing(named_leaves(given)):
        raise ValueError(
            f"params, model_state and key must be equal on all {jax.process_count()} "
            f"processes, got different {listed(names)}. Draw them from the same key on every "
            "process."
        )
