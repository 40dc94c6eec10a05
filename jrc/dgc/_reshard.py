"""Another number of replicas: every row of u and v shared out among the new ones."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrc._errors import listed
from jrc._typing import Array, PyTree
from jrc.dgc._collectives import AxisName, replica_axis
from jrc.dgc._state import dgc_specs, dgc_states
from jrc.dgc._units import checked_whole

Shares = tuple[tuple[tuple[int, float], ...], ...]
"""For each new row the old ones that it is made of, as pairs of rank and weight."""

_WHO = "jrc.reshard_dgc"


def reshard_dgc(
    state: PyTree,
    num_replicas: int,
    *,
    mesh: Mesh | None = None,
    axis_name: AxisName = "data",
) -> PyTree:
    r"""The state of a run on N replicas, made into one for N' of them.

    $$x'_j = N' \sum_i \left| \left[\tfrac{j}{N'}, \tfrac{j+1}{N'}\right] \cap
    \left[\tfrac{i}{N}, \tfrac{i+1}{N}\right] \right| x_i$$

    for u and v of every `DGCState` and for the gradients that an `optax.MultiSteps` around one
    gathers. The mean over the replicas, which is what updates are made of, stays as it was, up to
    the rounding of float32: each row is repeated if N' is a multiple of N, neighbours are averaged
    if N is one of N', and in between rows are shared out in proportion. All else is the same on
    every replica and stays.

    To go on from a save with another number of replicas, restore it with its own number first.
    Here it was saved with 4:

    ```python
    state = jrc.init_state(params, tx, key, mesh=mesh)  # the replicas of now
    like = jrc.reshard_dgc(jax.eval_shape(lambda: state), 4, mesh=mesh)
    state = jrc.reshard_dgc(jrc.restore(path, like), mesh.shape["data"], mesh=mesh)
    ```

    Args:
        state: Any tree with `DGCState`s in it, of all replicas (not inside `jax.shard_map`): an
            optimizer's state or a whole train state, of JAX or NumPy arrays, or of
            `jax.ShapeDtypeStruct`s.
        num_replicas: N', at least 1. N is the number of rows of u and v.
        mesh: Where the result goes; `None` leaves that to what arrived.
        axis_name: The mesh axis over which the rows are split, of a pair the outer one. Where
            it does not divide them, another dimension is split, or none.

    Returns:
        The same tree with N' rows; of shapes, their shapes, with shardings if a mesh is given.
        What does not change is not copied: a step that donates the new state takes it from the
        old one too.

    Raises:
        TypeError: When `num_replicas` is no int, or `mesh` no mesh.
        ValueError: When there is no `DGCState`, when the numbers of rows disagree, for a number
            below 1, or when the mesh has no such axis.

    Example:
        >>> state = jrc.scale_by_dgc(min_size=0).init(jnp.zeros(2))
        >>> rows = jnp.array([[1.0, 8.0], [3.0, 0.0]])
        >>> state = state._replace(u=rows, v=rows)
        >>> jrc.reshard_dgc(state, 1).v.tolist()
        [[2.0, 4.0]]
        >>> jrc.reshard_dgc(state, 3).v.tolist()
        [[1.0, 8.0], [2.0, 4.0], [3.0, 0.0]]
    """
    replicas = checked_whole(num_replicas, "num_replicas", _WHO)
    axis = replica_axis(axis_name, _WHO)
    mesh = _checked_mesh(mesh, axis)
    old = _rows_of(state)
    specs = dgc_specs(state, axis)
    whole = shares_of(old or replicas, replicas)

    def moved(path: Any, leaf: Any, spec: PartitionSpec) -> Any:
        if spec == PartitionSpec():
            return _placed(leaf, None if mesh is None else NamedSharding(mesh, spec))
        _check_leaf(path, leaf, old)
        lead = leaf.shape[0] // old * replicas
        shape = (lead, *leaf.shape[1:])
        sharding = None if mesh is None else _sharding(shape, replicas, mesh, axis)
        return _shared_out(leaf, shape, whole, sharding)

    return jax.tree.map_with_path(moved, state, specs)


def shares_of(old: int, new: int) -> Shares:
    """What each new row is made of: the old rows that it overlaps, all laid along one line.

    Weights of a row add up to one and each old row is used `new / old` times, so the mean stays.

    Args:
        old: N.
        new: N'.

    Returns:
        For each new row pairs of an old rank and its weight.

    >>> shares_of(2, 3)
    (((0, 1.0),), ((0, 0.5), (1, 0.5)), ((1, 1.0),))
    """

    def overlap(i: int, j: int) -> int:
        return min((i + 1) * new, (j + 1) * old) - max(i * new, j * old)

    return tuple(
        tuple((i, overlap(i, j) / old) for i in range(old) if overlap(i, j) > 0) for j in range(new)
    )


def _shared_out(
    leaf: Any, shape: tuple[int, ...], shares: Shares, sharding: NamedSharding | None
) -> Any:
    """The new rows of a leaf, where they belong."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
    if isinstance(leaf, np.ndarray):
        return _placed(np.asarray(_mixed(leaf, shares, np)), sharding)
    mix = functools.partial(_mixed, shares=shares, like=jnp)
    # Rows that stay on their devices never have to be whole on any of them.
    stays = sharding is not None and _devices(leaf) == sharding.device_set
    return _placed(jax.jit(mix, out_shardings=sharding if stays else None)(leaf), sharding)


def _mixed(leaf: Any, shares: Shares, like: Any) -> Array:
    """Weighted sums of rows; `like` is `numpy` or `jax.numpy`."""
    old = 1 + max(rank for parts in shares for rank, _ in parts)
    rows = leaf.reshape(old, leaf.shape[0] // old, *leaf.shape[1:])
    # A third is a poor weight in half precision, and none in integers.
    wide = jnp.promote_types(leaf.dtype, jnp.float32)
    mixed = [
        functools.reduce(
            operator.add, (rows[rank].astype(wide) * wide.type(part) for rank, part in parts)
        )
        for parts in shares
    ]
    return like.concatenate(mixed).astype(leaf.dtype)


def _placed(leaf: Any, sharding: NamedSharding | None) -> Any:
    if sharding is None:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return jax.device_put(leaf, sharding)


def _sharding(shape: tuple[int, ...], replicas: int, mesh: Mesh, axis_name: str) -> NamedSharding:
    """Rows split over the axis; what it does not divide is split along another dimension."""
    parts = mesh.shape[axis_name]
    sizes = (replicas, *shape[1:])
    at = next((i for i, size in enumerate(sizes) if size % parts == 0), None)
    spec = PartitionSpec() if at is None else PartitionSpec(*[None] * at, axis_name)
    return NamedSharding(mesh, spec)


def _devices(leaf: Any) -> Any:
    return None if isinstance(leaf, jax.core.Tracer) else leaf.sharding.device_set


def _rows_of(state: PyTree) -> int:
    """N, from the rows of every u and v; 0 if no leaf is compressed."""
    found = dgc_states(state)
    if not found:
        raise ValueError(
            f"{_WHO}: the state must hold a DGCState, got none in {type(state).__name__}; pass "
            "the state of an optimizer made with jrc.scale_by_dgc, or a train state with one"
        )
    leaves = jax.tree.leaves([(each.u, each.v) for each in found])
    rows = sorted({leaf.shape[0] for leaf in leaves})
    if len(rows) > 1:
        raise ValueError(
            f"{_WHO}: u and v of all leaves must have one row a replica, got "
            f"{' and '.join(map(str, rows))} rows; pass a state whose parts belong to one run"
        )
    return rows[0] if rows else 0


def _check_leaf(path: Any, leaf: Any, old: int) -> None:
    """That a leaf's first axis holds the replicas one after another."""
    name = jax.tree_util.keystr(path)
    if not old:
        raise ValueError(
            f"{_WHO}: the number of replicas is that of the rows of u and v, and no leaf is "
            f"compressed, while {name} differs between replicas; build this state anew with "
            "tx.init, or compress a leaf with a lower min_size"
        )
    if leaf.shape[0] % old:
        raise ValueError(
            f"{_WHO}: u and v have {old} rows, so the first axis of {name} must be a multiple of "
            f"{old}, got shape {leaf.shape}; pass the state of all replicas, not that of one"
        )


def _checked_mesh(mesh: Mesh | None, axis_name: str) -> Mesh | None:
    """The mesh, with axes of the kind that a train step has."""
    if mesh is None:
        return None
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"{_WHO}: mesh must be a jax.sharding.Mesh or None, got {mesh!r}; pass "
            f"jax.sharding.Mesh(devices, ({axis_name!r},))"
        )
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"{_WHO}: the mesh has the axes {listed(mesh.axis_names)}, none named {axis_name!r}; "
            "pass axis_name= one of them"
        )
    return Mesh(mesh.devices, mesh.axis_names)
