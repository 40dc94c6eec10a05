"""Which mesh axis of a run does what, and how every array lies on the mesh.

>>> import jax
>>> mesh = jax.make_mesh((2, 4), ("replica", "fsdp"))
>>> layout = Layout.of(mesh, "replica")
>>> layout.replicas, layout.means, layout.inside
('replica', None, ('fsdp',))
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jrc._errors import listed
from jrc._mesh_axes import axes_of_run, check_mesh_axes, mesh_over_all
from jrc._ring import ring_all_reduce_bytes
from jrc._specs import axes_of, mirrored, number_of_shards, padded, restricted, trimmed
from jrc._tree import aval_of, is_typed_key, named_leaves, put
from jrc._typing import PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """How the arrays of a run lie on a mesh.

    Attributes:
        mesh: The mesh.
        replicas: The axis along which replicas differ: rows of their own arrays are split over it.
        means: The axis over which gradients are averaged first, inside of a host; `None` without.
        inside: The axes inside of a replica (FSDP, tensor parallelism), those of size 1 too.
        params: A `PartitionSpec` for each parameter; `None` where there are no parameters yet.
        state: A `PartitionSpec` for each leaf of the train state, where a step needs it.
    """

    mesh: Mesh
    replicas: str
    means: str | None
    inside: tuple[str, ...]
    params: PyTree
    state: PyTree = None

    @classmethod
    def of(cls, mesh: Mesh | None, axis_name: Any, params: PyTree = None) -> "Layout":
        """Return the layout of a run.

        Args:
            mesh: The mesh; `None` is one axis over all devices of all processes.
            axis_name: The axis of the replicas, or the pair `(inner, outer)` of which gradients are
                averaged over the inner one first.
            params: The parameters, or their shapes with shardings.

        Returns:
            The layout.

        Raises:
            TypeError: If `mesh` is no mesh.
            ValueError: If `axis_name` is neither a name nor a pair of two, if the mesh has no such
                axis or no device of this process, or if a parameter is split over another mesh, or
                in a way that is no `NamedSharding`.
        """
        names = axes_of_run(axis_name)
        mesh = mesh_over_all(axis_name) if mesh is None else mesh
        check_mesh_axes(mesh, names)
        inside = tuple(name for name in mesh.axis_names if name not in names)
        layout = cls(mesh, names[0], names[1] if len(names) > 1 else None, inside, None)
        return layout if params is None else layout.with_params(params)

    def with_params(self, params: PyTree) -> "Layout":
        """Return the layout of a run with these parameters."""
        return dataclasses.replace(self, params=self.specs(params, "params"))

    def of_single_devices(self) -> "Layout":
        """Return the layout of replicas that are one device each, whatever axes there are."""
        return dataclasses.replace(self, inside=(), params=None)

    @property
    def names(self) -> tuple[str, ...]:
        """The axes over which a batch is split, that of the replicas first."""
        return (self.replicas,) if self.means is None else (self.replicas, self.means)

    @property
    def rows(self) -> int:
        """The number of replicas that have a row of their own."""
        return self.mesh.shape[self.replicas]

    @property
    def parts(self) -> int:
        """The number of parts of a batch."""
        return math.prod(self.mesh.shape[name] for name in self.names)

    @property
    def splits_replicas(self) -> tuple[str, ...]:
        """The axes inside of a replica with more than one device."""
        return tuple(name for name in self.inside if self.mesh.shape[name] > 1)

    @property
    def is_explicit(self) -> bool:
        """Whether an axis is explicit: arrays then carry their sharding in their types."""
        return AxisType.Explicit in self.mesh.axis_types

    def specs(self, tree: PyTree, what: str) -> PyTree:
        """Return how each leaf of a tree is split over the mesh; leaves that are whole stay whole.

        Args:
            tree: Arrays, or shapes with shardings.
            what: The name of the tree, for errors.

        Returns:
            The same tree with a `PartitionSpec` in each leaf's place.

        Raises:
            ValueError: If a leaf is split over another mesh, or by no `NamedSharding`.
        """
        specs = [self._spec(leaf, f"{what}/{name}") for name, leaf in named_leaves(tree)]
        return jax.tree.structure(tree).unflatten(specs)

    def _spec(self, leaf: Any, name: str) -> PartitionSpec:
        sharding = prescribed(leaf)
        if sharding is None or sharding.is_fully_replicated:
            return PartitionSpec()
        if not isinstance(sharding, NamedSharding):
            raise ValueError(
                f"arrays must be split by a NamedSharding, got {sharding} at {name!r}. "
                "Place it with jax.device_put(x, NamedSharding(mesh, PartitionSpec(...)))."
            )
        if not _same_devices(sharding.mesh, self.mesh):
            raise ValueError(
                f"arrays must be split over the mesh of the run, {_sizes(self.mesh)}, "
                f"got one over {_sizes(sharding.mesh)} at {name!r}. Pass the mesh of the "
                "parameters to jrc.init_state and jrc.make_train_step, or place them on this one."
            )
        return trimmed(sharding.spec)

    def like_params(self, state: PyTree, params: PyTree) -> PyTree:
        """Return how the state of an optimizer is split: arrays of a parameter as it is.

        Args:
            state: Any tree.
            params: The parameters, in the structure of those of the layout.

        Returns:
            The same tree with a `PartitionSpec` in each leaf's place.
        """
        specs = [
            trimmed(PartitionSpec(*((None,) if each.rows else ()), *(each.spec or ())))
            for each in mirrored(state, params, self.params)
        ]
        return jax.tree.structure(state).unflatten(specs)

    def in_rows(self, specs: PyTree) -> PyTree:
        """Return the specs of arrays with one row for each replica."""
        return jax.tree.map(lambda spec: trimmed(PartitionSpec(self.replicas, *spec)), specs)

    def within(self, specs: PyTree) -> PyTree:
        """Return specs over the axes inside of a replica alone."""
        return jax.tree.map(lambda spec: restricted(spec, self.inside), specs)

    def batch(self, batch: PyTree) -> PyTree:
        """Return how each leaf of a batch is split once it is placed, examples over the replicas.

        Arrays that are split so already, and over more axes, stay as they are.

        Raises:
            ValueError: If an array is split over another mesh.
        """
        names = self.names

        def placed(spec: PartitionSpec) -> PartitionSpec:
            first = axes_of(PartitionSpec(*spec[:1]))
            if first[: len(names)] == names:
                return spec
            rest = tuple(name for name in first if name not in names)
            taken = set(axes_of(PartitionSpec(*spec[1:]))) & set(names)
            return PartitionSpec((*names, *rest), *(() if taken else spec[1:]))

        return jax.tree.map(placed, self.specs(batch, "batch"))

    def shardings(self, specs: PyTree) -> PyTree:
        """Return the sharding of each spec."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)

    def shard(self, tree: PyTree, specs: PyTree) -> PyTree:
        """Return the shapes of what one device has of arrays that are split."""

        def shape(x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            entries = map(PartitionSpec, padded(spec, len(x.shape)))
            parts = [number_of_shards(entry, self.mesh.shape) for entry in entries]
            sizes = (size // part for size, part in zip(x.shape, parts, strict=True))
            return jax.ShapeDtypeStruct(tuple(sizes), x.dtype)

        return jax.tree.map(shape, tree, specs)

    def on_devices(self, fn: Callable[..., Any], ins: Any, outs: Any) -> Callable[..., Any]:
        """Return `fn` so that it gets the shards of a device, and its results are joined.

        Args:
            fn: A function of local arrays.
            ins: As for `jax.shard_map`, over the axes inside of a replica.
            outs: Likewise.
        """
        if not self.inside:
            return fn
        return jax.shard_map(
            fn, axis_names=set(self.inside), in_specs=ins, out_specs=outs, check_vma=False
        )

    def bytes_to_reduce(
        self,
        grads: Sequence[Any],
        specs: Sequence[PartitionSpec],
        over: Sequence[str] | None = None,
        itemsize: int | None = None,
    ) -> float:
        """Return the bytes that a device sends to reduce gradients over the axes of the replicas.

        A ring all-reduce of its shard over the axes that do not split a leaf, and a ring
        reduce-scatter over those that do.

        Args:
            grads: The gradients.
            specs: How each of them is split.
            over: Those of the axes that count; `None` for all.
            itemsize: Bytes of an entry; `None` for those of its dtype.
        """
        names, total = self.names if over is None else over, 0.0
        for grad, spec in zip(grads, specs, strict=True):
            sizes, split = self.mesh.shape, set(axes_of(spec))
            size = grad.size * (itemsize or grad.dtype.itemsize)
            own = size / number_of_shards(spec, sizes)
            scattered = math.prod(sizes[name] for name in names if name in split)
            reduced = math.prod(sizes[name] for name in names if name not in split)
            total += own * (scattered - 1) + ring_all_reduce_bytes(own, reduced, itemsize=1)
        return total


def check_whole(specs: PyTree, axes: Sequence[str], what: str, rule: str, remedy: str = "") -> None:
    """Raise if an array is split over an axis of the replicas: each of them has whole ones.

    Args:
        specs: A `PartitionSpec` for each array, or one.
        axes: The axes of the replicas.
        what: The name of the tree.
        rule: Why it must be whole, behind "on every replica".
        remedy: The way out, a sentence in which `{over}` is the axes; to split arrays inside of a
            replica if there is none.
    """
    for name, spec in named_leaves(specs):
        if names := sorted(set(axes_of(spec)) & set(axes)):
            over = listed(names)
            remedy = remedy or (
                f"Split {what} inside of a replica, over another axis: jax.make_mesh((2, 4), "
                f"({axes[0]!r}, 'fsdp')) and PartitionSpec('fsdp') (hybrid sharding)."
            )
            raise ValueError(
                f"{what} must be whole on every replica {rule}, got {name or 'a leaf'!r} split "
                f"over {over} by {spec}. {remedy.format(over=over)}"
            )


def prescribed(leaf: Any) -> Any:
    """Return the sharding that a user gave a leaf, `None` if it may be placed anywhere.

    Of a tracer it is that over explicit axes.
    """
    if isinstance(leaf, jax.core.Tracer):
        return aval_of(leaf).sharding
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return None
    committed = isinstance(leaf, jax.ShapeDtypeStruct) or leaf.committed
    return leaf.sharding if committed else None


def split_axes(*trees: PyTree) -> set[str]:
    """Return the mesh axes over which any array of some trees is split."""
    found = map(prescribed, jax.tree.leaves(trees))
    named = (sharding for sharding in found if isinstance(sharding, NamedSharding))
    return {name for sharding in named for name in axes_of(sharding.spec)}


def _same_devices(one: Mesh | AbstractMesh, other: Mesh | AbstractMesh) -> bool:
    """Whether two meshes have the same axes, over the same devices as far as these are known."""
    if one.axis_names != other.axis_names or dict(one.shape) != dict(other.shape):
        return False
    known = isinstance(one, Mesh) and isinstance(other, Mesh)
    return not known or bool(np.all(one.devices == other.devices))


def _sizes(mesh: Mesh | AbstractMesh) -> str:
    sizes = ", ".join(f"{name}: {size}" for name, size in mesh.shape.items())
    return f"Mesh({sizes})"


def same_types(one: Any, other: NamedSharding) -> bool:
    """Whether two shardings make arrays of one type: axes are explicit in both or in none."""

    def types(mesh: Any) -> dict[str, Any]:
        return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))

    if not isinstance(one, NamedSharding):
        return AxisType.Explicit not in other.mesh.axis_types
    return types(one.mesh) == types(other.mesh)


def placed(x: Any, sharding: NamedSharding) -> Any:
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
