"""Arguments on a target: shapes with shardings over its devices, in the place of arrays."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jrc._targets.accelerator import Target, target
from jrc._tree import aval_of, is_number, is_traced, path_name


def checked_target(given: Any) -> Target | None:
    """Return a target from itself or its name, or `None`.

    Raises:
        TypeError: If it is something else.
        ValueError: If there is none of this name.
    """
    if given is None or isinstance(given, Target):
        return given
    if isinstance(given, str):
        return target(given)
    raise TypeError(
        "target must be a jrc.Target, its name or None, got "
        f"{type(given).__name__}. Write target='v5e:2x2'."
    )


def abstract_on(to: Target, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments with a shape on the target for each array.

    What is sharded over devices of the target keeps its sharding. Everything else is replicated
    over the same devices, those of the mesh that is set, or lies on the target's first device.

    Args:
        to: The target.
        args: A pytree: arrays and `jax.ShapeDtypeStruct`s are replaced, other leaves stay.

    Raises:
        ValueError: If an argument is sharded over several devices that are not the target's, or
            two over different ones.
    """
    there = set(to.devices)
    paths, treedef = jax.tree_util.tree_flatten_with_path(args)
    shardings = [_sharding(leaf) for _, leaf in paths]
    for (path, _), sharding in zip(paths, shardings, strict=True):
        _check(to, there, path, sharding)
    kept = [s for s in shardings if s is not None and s.device_set <= there]
    rest = _replicated(to, kept)
    leaves = [
        _shape(leaf, sharding if sharding in kept else rest)
        for (_, leaf), sharding in zip(paths, shardings, strict=True)
    ]
    return treedef.unflatten(leaves)


def _sharding(leaf: Any) -> Sharding | None:
    found = getattr(leaf, "sharding", None) if is_traced(leaf) else None
    return found if isinstance(found, Sharding) and _has_devices(found) else None


def _has_devices(sharding: Sharding) -> bool:
    """Whether a sharding names devices: one over an abstract mesh does not."""
    return not isinstance(sharding, NamedSharding) or isinstance(sharding.mesh, Mesh)


def _check(to: Target, there: set[Any], path: Any, sharding: Sharding | None) -> None:
    if sharding is None or sharding.device_set <= there or len(sharding.device_set) == 1:
        return
    kinds = sorted({device.device_kind for device in sharding.device_set})
    raise ValueError(
        f"arguments must be sharded over devices of the target {to.name!r}, got "
        f"{path_name(path)!r} over {len(sharding.device_set)} of {', '.join(kinds)}. Build the "
        f"mesh of them: jax.make_mesh(shape, axes, devices=jrc.target({to.name!r}).devices)."
    )


def _replicated(to: Target, kept: Sequence[Sharding]) -> Sharding:
    """Return a replicated sharding over the devices of what is sharded, or on the first device."""
    sets = {frozenset(sharding.device_set) for sharding in kept}
    if len(sets) > 1:
        raise ValueError(
            "arguments must be sharded over the same devices, got some over "
            f"{' and some over '.join(str(len(each)) for each in sets)} of {to.name!r}. Use one "
            "mesh for all."
        )
    meshes = [s.mesh for s in kept if isinstance(s, NamedSharding) and isinstance(s.mesh, Mesh)]
    if not kept and (given := _mesh_that_is_set(to)):
        meshes = [given]
    devices = [device for device in to.devices if any(device in each for each in sets)]
    mesh = meshes[0] if meshes else Mesh(np.asarray(devices or to.devices[:1]), ("device",))
    return NamedSharding(mesh, PartitionSpec())


def _mesh_that_is_set(to: Target) -> Mesh | None:
    """Return the mesh of `jax.set_mesh`, if it is one of the target's devices."""
    try:
        given = jax.sharding.get_mesh()
    except ValueError:  # a function is being traced
        return None
    return given if not given.empty and given.devices.flat[0] in to.devices else None


def _shape(leaf: Any, sharding: Sharding) -> Any:
    if not is_traced(leaf) and not (isinstance(leaf, np.ndarray) and is_number(leaf)):
        return leaf
    aval = aval_of(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)
