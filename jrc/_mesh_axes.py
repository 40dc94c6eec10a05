"""The mesh axes of a run: their names, their sizes, and where a wrong one is refused.

A name may be of no form that names an axis (`replica_axis`), be no axis of the mesh
(`check_mesh_axes`), or not be bound in the trace (`num_replicas`).
"""

from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jrc._errors import listed
from jrc._typing import Array

AxisName = str | tuple[str, str]
"""One mesh axis, or a pair `(inner, outer)`: means along inner, compression along outer."""


def axes_of_run(axis_name: Any, what: str = "the name of one axis") -> tuple[str, ...]:
    """Return the axes that an `axis_name` names, that of the replicas first.

    Args:
        axis_name: One axis name, or a pair `(inner, outer)`.
        what: What else it may be than a pair, for the error.

    Raises:
        ValueError: If it is neither.

    >>> axes_of_run("data"), axes_of_run(("chip", "host"))
    (('data',), ('host', 'chip'))
    """
    pair = isinstance(axis_name, tuple) and len(axis_name) == 2 and len(set(axis_name)) == 2
    if not all(isinstance(name, str) for name in (axis_name if pair else (axis_name,))):
        raise ValueError(
            f"axis_name must be {what} or a pair (inner, outer) of two, got {axis_name!r}. Write "
            "axis_name='data', the mesh axis over which the replicas differ."
        )
    return axis_name[::-1] if pair else (axis_name,)


def replica_axis(axis_name: Any) -> str:
    """Return the axis along which replicas differ, of a pair the outer one; refuse all else."""
    return axes_of_run(axis_name)[0]


def check_mesh_axes(mesh: Any, names: tuple[str, ...]) -> None:
    """Raise unless this is a mesh with these axes, and with devices of this process."""
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh must be a jax.sharding.Mesh or None, got {type(mesh).__name__}. "
            f"Write jax.sharding.Mesh(devices, ({names[0]!r},))."
        )
    if AxisType.Manual in mesh.axis_types:
        raise ValueError(
            "mesh must have automatic or explicit axes, got axis_types="
            f"{mesh.axis_types}. Manual ones are made by jax.shard_map: leave axis_types out."
        )
    for name in names:
        if name not in mesh.axis_names:
            raise ValueError(
                f"axis_name must be an axis of the mesh, got {name!r}. The axes are "
                f"{listed(mesh.axis_names)}: pass one of them."
            )
    if not mesh.local_devices:
        raise ValueError(
            "mesh must have devices of every process, got "
            f"{listed(map(str, mesh.devices.flat))}, of which process {jax.process_index()} has "
            "none. Build the mesh of jax.devices(), or leave it out."
        )


def mesh_over_all(axis_name: AxisName) -> Mesh:
    """Return one automatic axis over all devices of all processes, neighbours beside each other.

    With several slices, whose network is slow, the devices of a slice lie one after another.
    """
    if not isinstance(axis_name, str):
        raise ValueError(
            "mesh must be given with a pair of axes, which depend on the hosts, got "
            f"axis_name={axis_name!r} alone. Pass "
            f"mesh=jax.make_mesh((hosts, devices), {axis_name[::-1]!r})."
        )
    devices = jax.devices()
    slices = {getattr(device, "slice_index", 0) for device in devices}
    if len(slices) == 1:
        return jax.make_mesh((len(devices),), (axis_name,), axis_types=(AxisType.Auto,))
    shape = (len(devices) // len(slices),)
    order = mesh_utils.create_hybrid_device_mesh(shape, (len(slices),), devices)
    return Mesh(np.asarray(order), (axis_name,))


def num_replicas(axis: str | None) -> int:
    """Return the number of replicas along an axis of the trace.

    Args:
        axis: Name of the replica axis, `None` for one replica.

    Returns:
        The axis size, 1 for `None`.

    Raises:
        ValueError: When nothing binds the axis, or `jax.vmap` does.
    """
    if not is_bound(axis):
        raise ValueError(
            "axis_name must be an axis that is bound by shard_map or pmap where update runs, got "
            f"axis_name={axis!r}. Call update inside jax.shard_map over a mesh with axis {axis!r} "
            f"or inside jax.pmap(..., axis_name={axis!r}), or pass axis_name=None for one replica."
        )
    return 1 if axis is None else lax.axis_size(axis)


def is_bound(axis: str | None) -> bool:
    """Whether the trace runs under a `shard_map` or `pmap` that names this axis."""
    if axis is None:
        return True
    try:
        lax.axis_size(axis)
    except NameError:
        return False
    return axis in jax.sharding.get_abstract_mesh().manual_axes  # jax.vmap's are in no mesh


def bound_axes(axis: str | None) -> tuple[str, ...]:
    """Return the replica axis and all other manual axes of the trace."""
    own = () if axis is None else (axis,)
    others = jax.sharding.get_abstract_mesh().manual_axes
    return (*own, *(name for name in others if name != axis and is_bound(name)))


def varies(x: Array, axis: str) -> bool:
    """Whether the type of `x` is varying: its value differs between the replicas."""
    return axis in jax.typeof(x).mat.varying


def is_tracked(axis: str) -> bool:
    """Whether types say what varies along the axis, as with `check_vma=True`."""
    return is_bound(axis) and varies(lax.axis_index(axis), axis)


def is_on_automatic_axes(aval: Any) -> bool:
    """Whether a value lies on automatic axes of a mesh whose axes are explicit around it.

    So does what `jax.random.normal(..., out_sharding=...)` computes inside: no equation of the
    program around may take it, a `reduce_precision` of what `jax.checkpoint` saves included.
    """
    explicit = jax.sharding.get_abstract_mesh().explicit_axes
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return mesh is not None and bool(set(explicit) & set(mesh.auto_axes))
