"""Another number of replicas: the rows of u and v mixed so that their mean stays."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrc._errors import listed, public
from jrc._mesh_axes import AxisName, check_mesh_axes, replica_axis
from jrc._specs import axes_of, padded, spec_inside, trimmed
from jrc._tree import named_leaves, put, sum_dtype
from jrc._typing import Array, PyTree, Whole
from jrc._validate import whole_number
from jrc.dgc._state import dgc_states
from jrc.dgc._state_specs import dgc_specs

Shares = tuple[tuple[tuple[int, float], ...], ...]
"""For each new row the old rows that it is a weighted sum of, as pairs of rank and weight."""


@public("jrc.reshard_dgc")
def reshard_dgc(
    state: PyTree,
    num_replicas: Whole,
    *,
    mesh: Mesh | None = None,
    axis_name: AxisName = "data",
) -> PyTree:
    r"""Return the state of a run on N replicas as one for N' replicas.

    $$x'_j = N' \sum_i \left| \left[\tfrac{j}{N'}, \tfrac{j+1}{N'}\right] \cap
    \left[\tfrac{i}{N}, \tfrac{i+1}{N}\right] \right| x_i$$

    for u and v of every `DGCState` and for the gradients that an `optax.MultiSteps` around one
    accumulates. The mean over the replicas, from which updates are made, stays, up to the rounding
    of float32: each row is repeated if N' is a multiple of N, neighbours are averaged if N is a
    multiple of N', and otherwise rows are mixed in proportion. All else is equal on every replica
    and stays.

    To continue from a save with another number of replicas, restore it with its own number first.
    Here it was saved with 4:

    ```python
    state = jrc.init_state(params, tx, key, mesh=mesh)  # the new number of replicas
    like = jrc.reshard_dgc(jax.eval_shape(lambda: state), 4, mesh=mesh)
    state = jrc.reshard_dgc(jrc.restore(path, like), mesh.shape["data"], mesh=mesh)
    ```

    Args:
        state: Any tree with `DGCState`s in it, of all replicas (not inside `jax.shard_map`): an
            optimizer's state or a whole train state, of JAX or NumPy arrays, or of
            `jax.ShapeDtypeStruct`s.
        num_replicas: N', at least 1. N is the number of rows of u and v.
        mesh: The mesh on which the result is placed; `None` leaves the placement as it is. What
            is split over axes inside of a replica stays so, where the mesh has these axes and they
            divide it. With such axes each array, or shape, must have a `NamedSharding`.
        axis_name: The mesh axis over which the rows are split, of a pair the outer one. Where
            its size does not divide them, another dimension is split, or none.

    Returns:
        The same tree with N' rows; of shapes, their shapes, with shardings if a mesh is given.
        Leaves that do not change are not copied: a step that donates the new state deletes them
        in the old one too.

    Raises:
        TypeError: When `num_replicas` is no whole number, or `mesh` no mesh.
        ValueError: When there is no `DGCState`, when the numbers of rows disagree, for a number
            below 1, when the mesh has no such axis, or when it has axes inside of a replica and an
            array does not say how it is split over them.

    Example:
        >>> state = jrc.scale_by_dgc(min_size=0).init(jnp.zeros(2))
        >>> rows = jnp.array([[1.0, 8.0], [3.0, 0.0]])
        >>> state = state._replace(u=rows, v=rows)
        >>> jrc.reshard_dgc(state, 1).v.tolist()
        [[2.0, 4.0]]
        >>> jrc.reshard_dgc(state, 3).v.tolist()
        [[1.0, 8.0], [2.0, 4.0], [3.0, 0.0]]
    """
    remedy = "Pass mesh.shape['data']."
    replicas = whole_number(num_replicas, "num_replicas", least=1, remedy=remedy)
    axis = replica_axis(axis_name)
    if mesh is not None:
        check_mesh_axes(mesh, (axis,))
    check_shardings_known(state, mesh, axis_name)
    old = _rows_of(state)
    specs = dgc_specs(state, axis)

    def resharded(path: Any, leaf: Any, spec: PartitionSpec) -> Any:
        if spec == PartitionSpec():
            there = None if mesh is None else NamedSharding(mesh, spec_inside(leaf, mesh, axis))
            return _placed(leaf, there)
        _check_leaf(path, leaf, old)
        return mixed_rows(leaf, old, replicas, mesh, axis)

    return jax.tree.map_with_path(resharded, state, specs)


def mixed_rows(x: Any, old: int, new: int, mesh: Mesh | None, axis: str) -> Any:
    """Return an array of N replicas, one after another, as one of N' with the same mean.

    Args:
        x: An array of NumPy or JAX, or its shape.
        old: N.
        new: N'.
        mesh: The mesh on which the result lies; `None` leaves it where it is.
        axis: The mesh axis over which rows are split.
    """
    shape = x.shape[0] // old * new, *x.shape[1:]
    sharding = None if mesh is None else _sharding(x, shape, new, mesh, axis)
    return changed(x, shape, functools.partial(_mixed, shares=shares_of(old, new)), sharding)


def shares_of(old: int, new: int) -> Shares:
    """Return the old rows, with weights, that each new row overlaps when all lie along one line.

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


def changed(
    x: Any, shape: tuple[int, ...], change: Callable[..., Any], sharding: NamedSharding | None
) -> Any:
    """Return an array with other rows.

    Args:
        x: An array of NumPy or JAX, or its shape.
        shape: That of the result.
        change: Returns the result from `x`; its `like=` is `numpy` or `jax.numpy`, as `x` is.
        sharding: Where the result lies; `None` leaves it where it is.
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)
    if isinstance(x, np.ndarray | np.generic):
        new = np.array(change(x, like=np))
        return new if sharding is None else put(new, sharding)
    is_placed = not isinstance(x, jax.core.Tracer)
    # With automatic axes: rows of explicit ones could not be taken one by one. Rows that stay on
    # their devices need never be gathered on one of them, of several processes neither.
    stays = sharding is not None and is_placed and x.sharding.device_set == sharding.device_set
    there = _automatic(sharding) if stays else None
    if is_placed and isinstance(x.sharding, NamedSharding):
        x = put(x, _automatic(x.sharding))
    new = jax.jit(functools.partial(change, like=jnp), out_shardings=there)(x)
    return new if sharding is None else put(new, sharding)


def _automatic(sharding: NamedSharding) -> NamedSharding:
    mesh = sharding.mesh
    return NamedSharding(Mesh(mesh.devices, mesh.axis_names), sharding.spec)


def _mixed(leaf: Any, shares: Shares, like: Any) -> Array | np.ndarray:
    """Return weighted sums of rows; `like` is `numpy` or `jax.numpy`."""
    old = 1 + max(rank for parts in shares for rank, _ in parts)
    rows = leaf.reshape(old, leaf.shape[0] // old, *leaf.shape[1:])
    # A weight of a third is inexact in half precision, and zero as an integer.
    wide = sum_dtype(leaf.dtype)
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
    return put(leaf, sharding)


def _sharding(
    leaf: Any, shape: tuple[int, ...], replicas: int, mesh: Mesh, axis: str
) -> NamedSharding:
    """Return a sharding of rows over the axis, or of another dimension that the axis divides."""
    parts = mesh.shape[axis]
    entries = list(padded(spec_inside(leaf, mesh, axis), len(shape)))
    sizes = [replicas, *shape[1:]]
    free = [at for at, size in enumerate(sizes) if at == 0 or entries[at] is None]
    at = next((at for at in free if sizes[at] % parts == 0), None)
    if at is not None:
        inner = axes_of(PartitionSpec(entries[at]))
        entries[at] = (axis, *inner) if inner else axis
    return NamedSharding(mesh, trimmed(PartitionSpec(*entries)))


def _rows_of(state: PyTree) -> int:
    """Return N, the number of rows of every u and v; 0 if no leaf is compressed."""
    found = dgc_states(state)
    if not found:
        raise ValueError(
            f"state must have a DGCState in it, got none in {type(state).__name__}. Pass "
            "the state of an optimizer made with jrc.scale_by_dgc, or a train state with one."
        )
    leaves = jax.tree.leaves([(each.u, each.v) for each in found])
    rows = sorted({leaf.shape[0] for leaf in leaves})
    if len(rows) > 1:
        raise ValueError(
            "u and v of all leaves must have one row for each replica, got "
            f"{' and '.join(map(str, rows))} rows. Pass a state whose parts belong to one run."
        )
    return rows[0] if rows else 0


def _check_leaf(path: Any, leaf: Any, old: int) -> None:
    """Raise if the first axis of a leaf is not the replicas one after another."""
    name = jax.tree_util.keystr(path)
    if not old:
        raise ValueError(
            "state must have a compressed leaf, whose rows give the number of replicas, "
            f"got none, while {name} differs between replicas. Build the state with tx.init, or "
            "compress a leaf with a lower min_size."
        )
    if leaf.shape[0] % old:
        raise ValueError(
            f"the first axis of {name} must be a multiple of {old}, the rows of u and v, "
            f"got shape {leaf.shape}. Pass the state of all replicas, not that of one."
        )


def check_shardings_known(state: PyTree, mesh: Mesh | None, axis_name: AxisName) -> None:
    """Raise if an array has no `NamedSharding`, and could be split inside of a replica.

    Args:
        state: Arrays or shapes.
        mesh: The mesh on which they are to lie.
        axis_name: The axis of the replicas, or the pair `(inner, outer)`.
    """
    if mesh is None:
        return
    names = [x for x in mesh.axis_names if x not in np.ravel(axis_name) and mesh.shape[x] > 1]
    for name, leaf in named_leaves(state):
        says = isinstance(getattr(leaf, "sharding", None), NamedSharding)
        if says or not names or isinstance(leaf, jax.core.Tracer) or not np.ndim(leaf):
            continue
        raise ValueError(
            f"state must say how its arrays are split over {listed(names)} inside of a "
            f"replica, got {type(leaf).__name__} without a NamedSharding at {name!r}. Leave mesh "
            "out, and place the result: jax.device_put(new, jax.tree.map(lambda x: x.sharding, "
            "like)) with the state of jrc.init_state as like; give shapes a sharding."
        )
