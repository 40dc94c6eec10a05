"""Saving and restoring a whole training state, through orbax.

A save goes to a numbered folder under the path that the user gives, and the one before is removed
only when the new one is whole: a kill at any moment leaves one that can be read. Next to the
arrays lies a list of their names, shapes and dtypes, so that what does not match is an error and
never a silent cast.
"""

import os
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jrc._tree import named_leaves

_FORMAT = 1


def save(path: str | os.PathLike[str], state: Any) -> None:
    """Save a pytree of arrays; when it fails, the save that was there before stays whole.

    Args:
        path: A folder, made if needed. It belongs to this state alone.
        state: A pytree whose leaves are all arrays (any shape, dtype and sharding, typed keys
            too), for instance a `jrc.TrainState`. Per-replica state is saved whole, of every
            replica. In a run of several processes every process calls `save`.

    Raises:
        TypeError: If a leaf is no array.
        NotADirectoryError: If `path` is a file.

    Example:
        >>> import jax.numpy as jnp, tempfile
        >>> state = {"w": jnp.arange(3.0)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     jrc.save(folder, state)
        ...     jrc.restore(folder, state)["w"].tolist()
        [0.0, 1.0, 2.0]

    Source: orbax-checkpoint.
    """
    leaves = named_leaves(state)
    for name, leaf in leaves:
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
            raise TypeError(
                f"jrc.save: every leaf is an array; {name!r} is {type(leaf).__name__} {leaf!r}. "
                "Make it one with jnp.asarray, or take it out of the state."
            )
    args = ocp.args.Composite(
        arrays=ocp.args.StandardSave(_stored(leaves)),
        manifest=ocp.args.JsonSave({"format": _FORMAT, "leaves": _manifest(leaves)}),
    )
    with _manager(_folder(path, "jrc.save", make=True)) as manager:
        latest = manager.latest_step()
        manager.save(0 if latest is None else latest + 1, args=args, force=True)


def restore(path: str | os.PathLike[str], like: Any) -> Any:
    """Read back the last whole save of a pytree, checked against the tree that is expected.

    Args:
        path: The folder that `jrc.save` was given.
        like: A pytree of arrays or `jax.ShapeDtypeStruct`s with the structure, shapes and dtypes
            that were saved. Its shardings say where the arrays go.

    Returns:
        A pytree like `like` with the saved values, bit for bit.

    Raises:
        FileNotFoundError: If there is no whole save at `path`.
        ValueError: If the tree, a shape or a dtype differs, or the save was not made by `jrc.save`
            or cannot be read.

    Example:
        >>> import jax.numpy as jnp, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     jrc.save(folder, {"w": jnp.ones(2)})
        ...     jrc.restore(folder, {"w": jnp.zeros(2)})["w"].tolist()
        [1.0, 1.0]
    """
    folder = _folder(path, "jrc.restore", make=False)
    leaves = named_leaves(like)
    with _manager(folder) as manager:
        step = manager.latest_step()
        if step is None:
            raise FileNotFoundError(
                f"jrc.restore: no whole save in {folder}. Give the folder that jrc.save was given."
            )
        _check(_read_manifest(manager, step, folder), _manifest(leaves), folder)
        wanted = {key: _abstract(leaf) for key, leaf in _stored(leaves).items()}
        try:
            args = ocp.args.Composite(arrays=ocp.args.StandardRestore(wanted))
            found = manager.restore(step, args=args)["arrays"]
        except Exception as error:
            raise ValueError(
                f"jrc.restore: the arrays of save {step} in {folder} cannot be read; they may be "
                "damaged. Restore a copy of the folder, or start anew."
            ) from error
    keyed = _keyed(leaves).items()
    return jax.tree.structure(like).unflatten(
        found[key] if key in wanted else _empty(leaf) for key, leaf in keyed
    )


def _folder(path: str | os.PathLike[str], who: str, make: bool) -> str:
    # orbax takes absolute paths only, and says so late.
    folder = os.path.abspath(os.path.expanduser(path))
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise NotADirectoryError(f"{who}: a save is a folder; {folder} is a file.")
    if not make and not os.path.isdir(folder):
        raise FileNotFoundError(
            f"{who}: there is no folder {folder}. Give the folder that jrc.save was given."
        )
    return folder


def _manager(folder: str) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(
        max_to_keep=1, enable_async_checkpointing=False, cleanup_tmp_directories=True
    )
    return ocp.CheckpointManager(folder, options=options)


def _keyed(leaves: list[tuple[str, Any]]) -> dict[str, Any]:
    """Leaves under keys that keep their order and cannot clash."""
    return {f"{i:05d}.{name.replace('/', '.')}": leaf for i, (name, leaf) in enumerate(leaves)}


def _stored(leaves: list[tuple[str, Any]]) -> dict[str, Any]:
    """What orbax gets: no arrays without elements, which it refuses, and never nothing at all.

    Of an empty array the manifest says all there is to know.
    """
    return {"format": np.asarray(_FORMAT)} | {k: x for k, x in _keyed(leaves).items() if x.size}


def _manifest(leaves: list[tuple[str, Any]]) -> list[list[Any]]:
    return [[name, list(leaf.shape), str(leaf.dtype)] for name, leaf in leaves]


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct | np.ndarray:
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        sharding = getattr(leaf, "sharding", None)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return np.asarray(leaf)


def _empty(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    return jax.device_put(np.zeros(leaf.shape, leaf.dtype), getattr(leaf, "sharding", None))


def _read_manifest(manager: ocp.CheckpointManager, step: int, folder: str) -> list[list[Any]]:
    try:
        found = manager.restore(step, args=ocp.args.Composite(manifest=ocp.args.JsonRestore()))
        manifest = found["manifest"]
        if manifest["format"] == _FORMAT:
            return manifest["leaves"]
        reason = f"its format is {manifest['format']}, this version reads {_FORMAT}"
    except (KeyError, TypeError, ValueError, OSError) as error:
        reason = f"it has no readable list of leaves ({type(error).__name__})"
    raise ValueError(
        f"jrc.restore: save {step} in {folder} was not made by this jrc.save: {reason}. "
        "Read it with the library that wrote it."
    )


def _check(saved: list[list[Any]], wanted: list[list[Any]], folder: str) -> None:
    """Every leaf must be there under its name, with its shape and dtype."""
    old = {name: (tuple(shape), dtype) for name, shape, dtype in saved}
    new = {name: (tuple(shape), dtype) for name, shape, dtype in wanted}
    for there, here, words in ((new, old, "is not saved"), (old, new, "is not expected")):
        missing = [name for name in there if name not in here]
        if missing:
            raise ValueError(
                f"jrc.restore: leaf {missing[0]!r} {words} ({len(missing)} such) in {folder}. "
                "Build `like` with the model and the optimizer that were saved."
            )
    for name, (shape, dtype) in new.items():
        if old[name] != (shape, dtype):
            raise ValueError(
                f"jrc.restore: leaf {name!r} was saved as {old[name][1]}{list(old[name][0])}, "
                f"`like` has {dtype}{list(shape)}. Nothing is cast or cut: build `like` as it was "
                "saved (compression state grows with the number of replicas)."
            )
