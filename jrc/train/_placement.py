"""Where the arrays of a run lie: state and batch on the mesh, with the shardings of their users."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jrc._specs import axes_of, trimmed
from jrc._tree import is_typed_key, named_leaves, put
from jrc._typing import PyTree


def own_specs(tree: PyTree, mesh: Mesh, who: str, what: str) -> PyTree:
    """Return how each leaf of a tree is split over the mesh; leaves that are whole stay whole.

    Args:
        tree: Arrays, or shapes with shardings.
        mesh: The mesh of the run.
        who: The public function, for errors.
        what: The name of the tree, for errors.

    Returns:
        The same tree with a `PartitionSpec` in each leaf's place.

    Raises:
        ValueError: If a leaf is split over another mesh, or in a way that is no `NamedSharding`.
    """
    specs = [_own_spec(leaf, mesh, f"{what}/{name}", who) for name, leaf in named_leaves(tree)]
    return jax.tree.structure(tree).unflatten(specs)


def _own_spec(leaf: Any, mesh: Mesh, name: str, who: str) -> PartitionSpec:
    sharding = _prescribed(leaf)
    if sharding is None or sharding.is_fully_replicated:
        return PartitionSpec()
    if not isinstance(sharding, NamedSharding):
        raise ValueError(
            f"{who}: arrays must be split by a NamedSharding, got {sharding} at {name!r}. Place "
            "it with jax.device_put(x, NamedSharding(mesh, PartitionSpec(...)))."
        )
    if not same_devices(sharding.mesh, mesh):
        raise ValueError(
            f"{who}: arrays must be split over the mesh of the run, {_axes(mesh)}, got one over "
            f"{_axes(sharding.mesh)} at {name!r}. Pass the mesh of the parameters to "
            "jrc.init_state and jrc.make_train_step, or place them on this one."
        )
    return trimmed(sharding.spec)


def _prescribed(leaf: Any) -> Any:
    """Return the sharding that a user gave a leaf, `None` if it may be placed anywhere."""
    if isinstance(leaf, jax.core.Tracer) or not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return None
    committed = isinstance(leaf, jax.ShapeDtypeStruct) or leaf.committed
    return leaf.sharding if committed else None


def same_devices(one: Mesh | AbstractMesh, other: Mesh | AbstractMesh) -> bool:
    """Whether two meshes have the same axes, over the same devices as far as these are known."""
    if one.axis_names != other.axis_names or dict(one.shape) != dict(other.shape):
        return False
    known = isinstance(one, Mesh) and isinstance(other, Mesh)
    return not known or bool(np.all(one.devices == other.devices))


def _axes(mesh: Mesh | AbstractMesh) -> str:
    sizes = ", ".join(f"{name}: {size}" for name, size in mesh.shape.items())
    return f"Mesh({sizes})"


def has_explicit(mesh: Mesh | AbstractMesh) -> bool:
    """Whether an axis of the mesh is explicit: arrays then carry their sharding in their types."""
    return AxisType.Explicit in mesh.axis_types


def inner_axes(mesh: Mesh, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the axes inside of a replica, those besides the axes of the step."""
    return tuple(name for name in mesh.axis_names if name not in names and mesh.shape[name] > 1)


def copied(x: Any, sharding: NamedSharding) -> jax.Array:
    """Return a copy with this sharding: a step that donates its state must not delete `x`.

    The dtype is explicit: a weak type would be lost at the first step, which would compile twice.
    """
    x = jnp.copy(x) if is_typed_key(x) else jnp.array(x, jnp.result_type(x))
    if not sharding.mesh.is_multi_process or not sharding.is_fully_replicated:
        return put(x, sharding)
    if isinstance(x, jax.core.Tracer) or not x.is_fully_addressable:
        return put(x, sharding)
    parts = [jax.device_put(x, device) for device in sharding.mesh.local_devices]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)


def placed_batch(batch: PyTree, mesh: Mesh, names: tuple[str, ...], who: str) -> PyTree:
    """Return the batch on the mesh, its examples split over the axes of the step.

    Arrays that are split so already, and over more axes, stay as they are.

    Args:
        batch: Arrays with examples along the leading axis; on several processes the NumPy arrays
            are equal on all.
        mesh: The mesh of the step.
        names: The axes of the step.
        who: The public function, for errors.

    Returns:
        The batch, of `jax.Array`s; shapes get shardings.

    Raises:
        ValueError: If an array is split over another mesh.
    """
    return jax.tree.map(
        lambda x, spec: placed_array(x, NamedSharding(mesh, spec)),
        batch,
        batch_specs(batch, mesh, names, who),
    )


def batch_specs(batch: PyTree, mesh: Mesh, names: tuple[str, ...], who: str) -> PyTree:
    """Return how each leaf of a batch is split once it is placed; see `placed_batch`."""

    def placed(spec: PartitionSpec) -> PartitionSpec:
        first = axes_of(PartitionSpec(*spec[:1]))
        if first[: len(names)] == names:
            return spec
        rest = tuple(name for name in first if name not in names)
        taken = set(axes_of(PartitionSpec(*spec[1:]))) & set(names)
        return (
            PartitionSpec((*names, *rest)) if taken else PartitionSpec((*names, *rest), *spec[1:])
        )

    return jax.tree.map(placed, own_specs(batch, mesh, who, "batch"))


def placed_array(x: Any, sharding: NamedSharding) -> Any:
    """Return an array with this sharding, itself if it has it; shapes get it, tracers do not."""
    if isinstance(x, jax.core.Tracer):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type)
    if isinstance(x, jax.Array):
        here = x.committed and x.sharding.is_equivalent_to(sharding, x.ndim)
        if here and same_types(x.sharding, sharding):
            return x
    return put(x, sharding)


def same_types(one: Any, other: NamedSharding) -> bool:
    """Whether two shardings make arrays of one type: axes are explicit in both or in none."""
    if not isinstance(one, NamedSharding):
        return not has_explicit(other.mesh)
    return dict(zip(one.mesh.axis_names, one.mesh.axis_types, strict=True)) == dict(
        zip(other.mesh.axis_names, other.mesh.axis_types, strict=True)
    )


def split_axes(*trees: PyTree) -> set[str]:
    """Return the mesh axes over which any array of some trees is split."""
    return {name for leaf in _shardings(trees) for name in axes_of(leaf.spec)}


def _shardings(tree: PyTree) -> Iterator[NamedSharding]:
    found = map(_prescribed, jax.tree.leaves(tree))
    return (sharding for sharding in found if isinstance(sharding, NamedSharding))
