"""Restoring: the last whole save, checked leaf by leaf."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jrc._multihost import all_or_none, of_all
from jrc._tree import is_typed_key
from jrc.persist._folder import PREFIX, SHARED, checked_folder, latest
from jrc.persist._leaves import Leaf, check_type, leaves_of
from jrc.persist._manifest import check_same, keys_of, manifest_of, read_manifest, stored


def restore(path: str | os.PathLike[str], like: Any) -> Any:
    """Read back the last whole save of a pytree, checked against the tree that is expected.

    Args:
        path: The folder that `jrc.save` was given.
        like: A pytree of arrays or `jax.ShapeDtypeStruct`s with the structure, shapes and dtypes
            that were saved. Its shardings say where the arrays go. In a run of several processes
            every process calls `restore`.

    Returns:
        A pytree like `like` with the saved values, bit for bit.

    Raises:
        TypeError: If a leaf of `like` is no array, or `path` no path.
        FileNotFoundError: If there is no whole save at `path`.
        ValueError: If the tree, a shape or a dtype differs, or the save was not made by `jrc.save`
            or cannot be read.
        RuntimeError: If another process of the run failed; the text is that of its error.

    Example:
        >>> import jax.numpy as jnp, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     jrc.save(folder, {"w": jnp.ones(2)})
        ...     jrc.restore(folder, {"w": jnp.zeros(2)})["w"].tolist()
        [1.0, 1.0]
    """
    leaves = leaves_of(like)
    folder = all_or_none(lambda: _checked_for_restore(path, leaves), "jrc.restore")
    while (step := _agreed_latest(folder)) is not None:
        try:
            return all_or_none(lambda: _read(folder, step, like, leaves), "jrc.restore")
        except Exception:
            # Or has somebody saved meanwhile, and removed the save that was being read?
            if step == _agreed_latest(folder):
                raise
    raise FileNotFoundError(
        f"jrc.restore: no whole save in {folder}. Give the folder that jrc.save was given."
    )


def _checked_for_restore(path: str | os.PathLike[str], leaves: list[Leaf]) -> str:
    folder = checked_folder(path, "jrc.restore", make=False)
    for leaf in leaves:
        if not isinstance(leaf.value, jax.ShapeDtypeStruct):
            check_type(leaf, "jrc.restore", "`like` holds arrays or jax.ShapeDtypeStructs")
    return folder


def _agreed_latest(folder: str) -> int | None:
    """The last whole save that process 0 sees."""
    seen = all_or_none(lambda: latest(folder), "jrc.restore")
    step = int(of_all(-1 if seen is None else seen)[0])
    return None if step < 0 else step


def _read(folder: str, step: int, like: Any, leaves: list[Leaf]) -> Any:
    """One whole save, checked against the leaves that are expected."""
    where = os.path.join(folder, f"{PREFIX}_{step}")
    if not os.path.isdir(where):
        raise FileNotFoundError(
            f"jrc.restore: process {jax.process_index()} does not see the save {where}. {SHARED}"
        )
    # No manager here: it would look at all saves, and tidy up.
    with _reader() as reader:
        check_same(read_manifest(reader, where), manifest_of(leaves), where)
        wanted = {key: _abstract(x) for key, x in stored(leaves).items()}
        try:
            args = ocp.args.Composite(arrays=ocp.args.StandardRestore(wanted))
            found = reader.restore(where, args=args)["arrays"]
        except Exception as error:
            raise ValueError(
                f"jrc.restore: the arrays in {where} cannot be read; they may be damaged. "
                "Restore a copy of the folder, or start anew."
            ) from error
    values = (
        found[key] if key in wanted else _empty(leaf.value)
        for key, leaf in zip(keys_of(leaves), leaves, strict=True)
        if leaf.value is not None
    )
    return jax.tree.structure(like).unflatten(values)


def _reader() -> ocp.Checkpointer:
    """A reader that waits for no other process: each reads its own parts."""
    here = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=here, active_processes={here}, barrier_sync_key_prefix=f"jrc_{here}"
    )
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=alone)
    )
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct | np.ndarray:
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        sharding = getattr(leaf, "sharding", None)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return np.asarray(leaf)


def _empty(leaf: Any) -> Any:
    """An array without elements: of `like`, where it is one."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if is_typed_key(leaf):
        return jnp.empty(leaf.shape, leaf.dtype)
    return jax.device_put(np.zeros(leaf.shape, leaf.dtype), getattr(leaf, "sharding", None))
