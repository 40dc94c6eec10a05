"""Another number of replicas, for any training state: workers leave and join between rounds."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrc._errors import public, speaking_as
from jrc._layout import Layout
from jrc._mesh_axes import AxisName, replica_axis
from jrc._specs import shards_of, spec_inside, trimmed
from jrc._tree import aval_of, nodes_of, sum_dtype
from jrc._typing import PyTree, Whole
from jrc._validate import whole_number
from jrc.dgc import reshard_dgc
from jrc.dgc._internal import changed, check_shardings_known, mixed_rows
from jrc.outer_optimizers import LocalState, OuterOptimizer, OuterState
from jrc.train._arguments import check_outer
from jrc.train._synchronisation.outer_state import (
    first_outer_state,
    fragments_where_they_lie,
)


@public("jrc.reshard")
def reshard(
    state: PyTree,
    num_replicas: Whole,
    *,
    mesh: Mesh | None = None,
    axis_name: AxisName = "data",
    outer: OuterOptimizer | None = None,
) -> PyTree:
    """Return the state of a run on N replicas as one for N' replicas.

    With an outer optimizer, between two rounds: every replica begins the next round with the shared
    parameters. The states of the inner optimizers and what was not sent are mixed so that their
    means stay, as `jrc.reshard_dgc` mixes u and v; counters and keys are those of the nearest
    replica. Without one this is `jrc.reshard_dgc`.

    With several fragments, or overlap, some of what replicas have changed is not exchanged yet at
    any time. It is mixed in the same way, so that no inner step is lost, after any step behind
    which no exchange is under way.

    Replicas that are split stay so: from 2 replicas of 4 devices to 4 of 2, or from 2 hosts of 8
    devices to 3. Parameters, inner states and what was not sent are split over the new mesh as over
    the old one, where it has these axes and they divide them.

    To continue from a save with another number of replicas, restore it with its own number first.
    Here it was saved with 4:

    ```python
    state = jrc.init_state(params, tx, key, mesh=mesh, outer=outer)  # the new number
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    like = jrc.reshard(jax.tree.map(shape, state), 4, mesh=mesh)
    state = jrc.reshard(jrc.restore(path, like), mesh.shape["data"], mesh=mesh)
    ```

    Args:
        state: A train state of all replicas, of JAX or NumPy arrays, or its shapes. Without a mesh
            NumPy arrays become NumPy arrays.
        num_replicas: N', at least 1.
        mesh: The mesh on which the result is placed; `None` leaves the placement as it is. With
            axes inside of a replica each array, or shape, must have a `NamedSharding`.
        axis_name: The mesh axis of the replicas, or the pair `(inner, outer)`.
        outer: The outer optimizer, with `overlap=1` and replicas that are split in another way:
            messages are those of one device, and get new sizes.

    Returns:
        The same tree with N' rows in what each replica has of its own.

    Raises:
        TypeError: If `num_replicas` is no whole number, or `mesh` no mesh.
        ValueError: If a round is not finished, or an overlapped exchange under way, if there is
            nothing to share out, for a number below 1, if the mesh has no such axis, if an array
            does not say how it is split inside of a replica, or if replicas are split so that
            fragments are cut elsewhere, or messages have other sizes and `outer` is not given.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> outer = jrc.SparseLoCo(sync_every=2)
        >>> params = {"w": jnp.ones(3)}
        >>> state = jrc.init_state(params, optax.adam(0.1), jax.random.key(0), outer=outer)
        >>> jrc.reshard(state, 3).opt_state.local.params["w"].shape
        (3, 3)
    """
    remedy = "Pass mesh.shape['data']."
    replicas = whole_number(num_replicas, "num_replicas", least=1, remedy=remedy)
    found = nodes_of(state, OuterState)
    with speaking_as("jrc.reshard", "jrc.reshard_dgc"):
        if not found:
            return reshard_dgc(state, replicas, mesh=mesh, axis_name=axis_name)
        _check_whole(state)
        for each in found:
            _check_finished(each)
        axis = replica_axis(axis_name)
        layout = None if mesh is None else Layout.of(mesh, axis_name)
        placed = _Placement(mesh, axis, replicas)
        if layout is not None:
            check_shardings_known(state, layout.mesh, axis_name)
            for each in found:
                _check_split(each, state.params, placed, outer, layout)
    params, model_state = jax.tree.map(placed.shared, (state.params, state.model_state))

    def resharded(node: Any) -> Any:
        if not isinstance(node, OuterState):
            return placed.shared(node)
        old = node.rounds, node.shared, node.report
        rounds, momentum, report = jax.tree.map(placed.shared, old)
        own = jax.tree.map(placed.rows, _apart(node, state.params))
        if _exchanges_all(node):
            own = own._replace(
                params=jax.tree.map(placed.copies, state.params),
                model_state=jax.tree.map(placed.copies, state.model_state),
            )
        else:
            own = own._replace(params=jax.tree.map(_together, own.params, params))
        if node.local.in_flight is not None and layout is not None and outer is not None:
            empty = _in_flight(outer, params, model_state, layout, own.steps)
            own = own._replace(in_flight=empty)
        return OuterState(rounds, momentum, report, own)

    return jax.tree.map(resharded, state, is_leaf=lambda node: isinstance(node, OuterState))


def _check_whole(state: Any) -> None:
    """Raise unless there are the parameters with which every replica begins a round."""
    if not (hasattr(state, "params") and hasattr(state, "model_state")):
        raise ValueError(
            "state must be a whole train state with an outer optimizer, which has the shared "
            f"parameters, got {type(state).__name__}. Pass the state of jrc.init_state."
        )


def _exchanges_all(state: OuterState) -> bool:
    """Whether replicas have nothing of their own after an exchange: one fragment, no overlap."""
    return state.report.kept.size == 1 and state.local.in_flight is None


def _check_finished(state: OuterState) -> None:
    """Raise if something would be lost: steps since the last round, or a message under way."""
    local = state.local
    if isinstance(local.steps, jax.ShapeDtypeStruct):
        return
    steps = int(np.max(_local_part(local.steps), initial=0))
    if _exchanges_all(state) and steps:
        raise ValueError(
            f"state must be one between two rounds, got one with {steps} inner steps since "
            "the last. Take the steps up to the end of the round first."
        )
    if local.in_flight is not None and _local_part(local.in_flight.header).any():
        raise ValueError(
            "state must have no exchange under way, got one whose next step applies the "
            "last round. Take that step first."
        )


def _check_split(
    state: OuterState,
    params: PyTree,
    placed: "_Placement",
    outer: OuterOptimizer | None,
    layout: Layout,
) -> None:
    """Raise if what replicas have does not fit replicas that are split as the mesh splits them."""
    check_outer(outer)
    count, flight = state.report.kept.size, state.local.in_flight
    new = jax.tree.map(lambda x: placed.shared(aval_of(x)), params)
    # What was not sent has the shapes of the fragments.
    if fragments_where_they_lie(params, count) != fragments_where_they_lie(new, count):
        raise ValueError(
            f"mesh must split the leading axes of params as before with {count} fragments, "
            "which are not cut where a leading axis is split, got one on which they are cut "
            "elsewhere. Use a mesh with the same axes inside of a replica."
        )
    if flight is None or outer is not None:
        return
    before = shards_of(flight.header, first=1)
    devices = math.prod(layout.mesh.shape[name] for name in layout.inside)
    if before != devices or _parts(params) != _parts(new):
        raise ValueError(
            "outer must be given with overlap=1 where replicas are split in another way, "
            f"got None for {devices} devices and {before} before. Pass outer=outer."
        )


def _parts(params: PyTree) -> list[tuple[int, ...]]:
    """The number of parts of each array along each of its dimensions."""
    leaves = jax.tree.leaves(params)
    return [tuple(shards_of(x, k, k + 1) for k in range(x.ndim)) for x in leaves]


def _in_flight(
    outer: OuterOptimizer, params: PyTree, model_state: PyTree, layout: Layout, steps: Any
) -> PyTree:
    """Return empty messages, as long as those of a device of the mesh."""
    given = params, model_state, None, layout.with_params(params)
    first = first_outer_state(outer, *given, shapes=True)
    rows = layout.replicas if steps.shape[0] % layout.rows == 0 else None
    sharding = NamedSharding(layout.mesh, trimmed(PartitionSpec(rows, layout.inside or None)))

    def empty(x: Any) -> Any:
        shape = steps.shape[0], *x.shape[1:]
        if isinstance(steps, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)
        return jax.jit(lambda: jnp.zeros(shape, x.dtype), out_shardings=sharding)()

    return jax.tree.map(empty, first.local.in_flight)


def _apart(state: OuterState, shared: PyTree) -> LocalState:
    """Return what each replica has, its parameters as their difference from the shared ones."""
    if _exchanges_all(state):
        return state.local

    def apart(rows: Any, x: Any) -> Any:
        wide = sum_dtype(rows.dtype)
        subtract = lambda rows, x: rows.astype(wide) - x.astype(wide)[None]  # noqa: E731
        return _of_rows(subtract, rows, x, wide)

    return state.local._replace(params=jax.tree.map(apart, state.local.params, shared))


def _together(rows: Any, x: Any) -> Any:
    """Return rows that differ so much from what is shared, in its dtype."""
    add = lambda rows, x: (rows + x.astype(rows.dtype)[None]).astype(x.dtype)  # noqa: E731
    return _of_rows(add, rows, x, x.dtype)


def _of_rows(fn: Callable[..., Any], rows: Any, x: Any, dtype: Any) -> Any:
    """Return `fn(rows, x)`, of this dtype, where the rows lie; of shapes its shape."""
    if isinstance(rows, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(rows.shape, dtype, sharding=rows.sharding)
    if isinstance(rows, np.ndarray):
        return fn(rows, np.asarray(x))
    return jax.jit(fn, out_shardings=rows.sharding)(rows, x)


def _local_part(x: Any) -> np.ndarray:
    """Return the rows of this process."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return np.concatenate([np.ravel(shard.data) for shard in x.addressable_shards])
    return np.asarray(x)


class _Placement:
    """How the arrays that are not mixed get their new rows, and where they lie."""

    def __init__(self, mesh: Mesh | None, axis: str, replicas: int) -> None:
        self.replicas, self._mesh, self._axis = replicas, mesh, axis

    def shared(self, x: Any) -> Any:
        """Return what is equal on every replica."""
        return changed(x, x.shape, lambda x, like: x, self._sharding(x))

    def rows(self, x: Any) -> Any:
        """Return floats mixed as those of a compression, and of all else the nearest old rows."""
        if jnp.issubdtype(x.dtype, jnp.floating):
            return mixed_rows(x, x.shape[0], self.replicas, self._mesh, self._axis)
        at = np.arange(self.replicas) * x.shape[0] // self.replicas
        shape = self.replicas, *x.shape[1:]
        return changed(x, shape, lambda x, like: x[at], self._sharding(x, first=1))

    def copies(self, x: Any) -> Any:
        """Return a row for each replica."""
        shape = (self.replicas, *x.shape)
        copies = lambda x, like: like.broadcast_to(x, shape)  # noqa: E731
        return changed(x, shape, copies, self._sharding(x, first=0))

    def _sharding(self, x: Any, first: int | None = None) -> NamedSharding | None:
        """Return where a leaf lies, with rows in front of its dimensions from `first` on."""
        if self._mesh is None:
            return None
        spec = spec_inside(x, self._mesh, self._axis)
        if first is not None:
            splits = self.replicas % self._mesh.shape[self._axis] == 0
            spec = PartitionSpec(self._axis if splits else None, *spec[first:])
        return NamedSharding(self._mesh, trimmed(spec))
