"""Restore the last complete save, checked leaf by leaf."""

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrc._errors import public
from jrc._multihost import all_or_none, of_all
from jrc._optional import needed
from jrc._tree import is_typed_key
from jrc._typing import Whole
from jrc.persist._folder import (
    PREFIX,
    SHARED,
    check_order,
    checked_folder,
    checked_step,
    complete_saves,
    finish_save,
)
from jrc.persist._leaves import Leaf, check_type, leaves_of
from jrc.persist._manifest import check_same, keys_of, manifest_of, read_manifest, stored


@public("jrc.restore")
def restore(path: str | os.PathLike[str], like: Any, *, step: Whole | None = None) -> Any:
    """Return the last complete save of a pytree, checked against the expected tree.

    Args:
        path: The folder that was given to `jrc.save`.
        like: A pytree of arrays or `jax.ShapeDtypeStruct`s with the structure, shapes and dtypes
            that were saved. The arrays are placed by its shardings. In a run of several processes
            every process calls `restore`.
        step: The number of the save, as `jrc.save` was given it; the last one if left out.

    Returns:
        A pytree like `like` with the saved values, bit for bit.

    Raises:
        ModuleNotFoundError: If orbax is not installed.
        TypeError: If a leaf of `like` is not an array, `path` no path, or `step` no number.
        FileNotFoundError: If there is no complete save at `path`, or none of this step.
        ValueError: If the tree, a shape or a dtype differs, `path` is a URL, or the save was not
            made by `jrc.save` or cannot be read.
        RuntimeError: If another process of the run failed; the text is that of its error.

    Example:
        >>> import jax.numpy as jnp, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     jrc.save(folder, {"w": jnp.ones(2)})
        ...     jrc.restore(folder, {"w": jnp.zeros(2)})["w"].tolist()
        [1.0, 1.0]
    """
    needed("orbax.checkpoint")
    check_order(path, like, "like")
    leaves = leaves_of(like)
    if step is not None:
        step = checked_step(step)
    folder = all_or_none(lambda: _checked_for_restore(path, leaves))
    finish_save(folder)
    while True:
        number = _agreed_step(folder, step)
        try:
            read = functools.partial(_read, folder, number, like, leaves)
            return all_or_none(read)
        except Exception:
            # Unless another run has saved meanwhile, and removed the save that was being read.
            if number == _agreed_step(folder, step):
                raise


def _checked_for_restore(path: Any, leaves: list[Leaf]) -> str:
    """Return the folder after a check of path and leaves."""
    folder = checked_folder(path, make=False)
    for leaf in leaves:
        if not isinstance(leaf.value, jax.ShapeDtypeStruct):
            check_type(leaf, "every leaf of like must be an array or a jax.ShapeDtypeStruct")
    return folder


def _agreed_step(folder: str, step: int | None) -> int:
    """Return the last complete save that process 0 sees, or that of a step."""
    found = all_or_none(lambda: complete_saves(folder))
    wanted = found[-1] if step is None and found else step
    number = int(of_all(wanted if wanted in found else -1)[0])
    if number < 0 and found:
        raise FileNotFoundError(
            f"step must be that of a save in {folder}, got {step}. The saves there "
            f"are {', '.join(map(str, found))}."
        )
    if number < 0:
        raise FileNotFoundError(
            f"path must be the folder of a save, got {folder}, which has no complete "
            "save. Give the folder that was given to jrc.save."
        )
    return number


def _read(folder: str, step: int, like: Any, leaves: list[Leaf]) -> Any:
    """Return one complete save, checked against the expected leaves."""
    where = os.path.join(folder, f"{PREFIX}_{step}")
    if not os.path.isdir(where):
        raise FileNotFoundError(
            f"path must be one folder for all processes, got {folder}, in which "
            f"process {jax.process_index()} does not see {PREFIX}_{step}. {SHARED}"
        )
    # Not through orbax's manager, which removes saves that are being written.
    with _reader() as reader:
        check_same(read_manifest(reader, where), manifest_of(leaves), where)
        wanted = {key: _target(x) for key, x in stored(leaves).items()}
        try:
            ocp = needed("orbax.checkpoint")
            args = ocp.args.Composite(arrays=ocp.args.StandardRestore(wanted))
            found = reader.restore(where, args=args)["arrays"]
        except Exception as error:
            raise ValueError(
                f"path must hold a readable save, got {where}, whose arrays cannot be "
                "read; they may be damaged. Restore a copy of the folder."
            ) from error
    values = (
        found[key] if key in wanted else _empty(leaf.value)
        for key, leaf in zip(keys_of(leaves), leaves, strict=True)
        if leaf.value is not None
    )
    return jax.tree.structure(like).unflatten(values)


def _reader() -> Any:
    """Return an orbax reader without barriers: each process reads its own shards."""
    ocp = needed("orbax.checkpoint")
    here = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=here, active_processes={here}, barrier_sync_key_prefix=f"jrc_{here}"
    )
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=alone)
    )
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _target(leaf: Any) -> jax.ShapeDtypeStruct | np.ndarray:
    """Return what orbax restores a leaf to; an uncommitted array too gives its own device."""
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        sharding = getattr(leaf, "sharding", None)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return np.asarray(leaf)


def _empty(leaf: Any) -> Any:
    """Return an array without elements, that of `like` itself if it is one."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if is_typed_key(leaf):
        return jnp.empty(leaf.shape, leaf.dtype)
    return jax.device_put(np.zeros(leaf.shape, leaf.dtype), getattr(leaf, "sharding", None))
