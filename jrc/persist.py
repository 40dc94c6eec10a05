"""Saving and restoring a whole training state, through orbax.

A save goes to a numbered folder under the path that the user gives, and the one before is removed
only when the new one is whole: a kill at any moment leaves one that can be read. Next to the
arrays lies a list of their places in the tree, their shapes and dtypes, so that what does not
match is an error and never a silent cast.

Several processes agree before each of orbax's collective steps: an error on one is an error on all,
where the others would wait for the one that failed.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jrc._lock import locked
from jrc._processes import all_or_none, differing, of_all
from jrc._tree import is_typed_key, path_name

_FORMAT = 1

# Saves are folders `jrc_0`, `jrc_1`, …: nobody else's folders are counted, read or removed.
_PREFIX = "jrc"

# Held by process 0 while it saves.
_LOCK = ".jrc_lock"

_SHARED = "Give every process the same folder, on a file system that they share."


class _Leaf(NamedTuple):
    """A leaf with its exact place in the tree, and with its name for people."""

    place: str
    name: str
    value: Any


def save(path: str | os.PathLike[str], state: Any) -> None:
    """Save a pytree of arrays; when it fails, the save that was there before stays whole.

    Args:
        path: A folder, made if needed. It belongs to this state alone; runs that save to one
            folder at the same time wait for each other, and the last one stays. Several processes
            give the same folder, on a file system that they share.
        state: A pytree whose leaves are all arrays (any shape, dtype and sharding, typed keys
            too), for instance a `jrc.TrainState`. Per-replica state is saved whole, of every
            replica. In a run of several processes every process calls `save`; of NumPy arrays that
            of process 0 is saved.

    Raises:
        TypeError: If a leaf is no array, or `path` no path.
        NotADirectoryError: If `path` is a file.
        ValueError: If an array was donated and is gone, the processes of a run have different
            trees, or a `jax.Array` lies on one of them alone.
        FileNotFoundError: If a process does not see the folder of process 0.
        RuntimeError: If another process of the run failed; the text is that of its error.

    Example:
        >>> import jax.numpy as jnp, tempfile
        >>> state = {"w": jnp.arange(3.0)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     jrc.save(folder, state)
        ...     jrc.restore(folder, state)["w"].tolist()
        [0.0, 1.0, 2.0]

    Source: orbax-checkpoint.
    """
    leaves = _leaves(state)
    folder = all_or_none(lambda: _checked_for_save(path, leaves), "jrc.save")
    if differing([(f"{leaf.place}: {_kind(leaf)}", 0) for leaf in leaves]):
        raise ValueError(
            "jrc.save: every process saves the same tree of the same shapes and dtypes; they "
            "differ. Call jrc.save with the whole state on every process."
        )
    args = ocp.args.Composite(
        arrays=ocp.args.StandardSave(_stored(leaves)),
        manifest=ocp.args.JsonSave({"format": _FORMAT, "leaves": _manifest(leaves)}),
    )
    options = ocp.CheckpointManagerOptions(
        max_to_keep=1,
        step_prefix=_PREFIX,
        enable_async_checkpointing=False,
        cleanup_tmp_directories=True,  # what a killed save left behind
    )
    with _only_writer(folder), ocp.CheckpointManager(folder, options=options) as manager:
        latest = manager.latest_step()
        # Process 0's, where others see it later.
        step = int(of_all(0 if latest is None else latest + 1)[0])
        manager.save(step, args=args, force=True)


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
    leaves = _leaves(like)
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


def _checked_for_save(path: str | os.PathLike[str], leaves: list[_Leaf]) -> str:
    for leaf in leaves:
        _check_type(leaf)
        _check_there(leaf)
        _check_place(leaf)
    return _folder(path, "jrc.save", make=True)


def _checked_for_restore(path: str | os.PathLike[str], leaves: list[_Leaf]) -> str:
    folder = _folder(path, "jrc.restore", make=False)
    for leaf in leaves:
        if not isinstance(leaf.value, jax.ShapeDtypeStruct):
            _check_type(leaf, "jrc.restore", "`like` holds arrays or jax.ShapeDtypeStructs")
    return folder


@contextlib.contextmanager
def _only_writer(folder: str) -> Iterator[None]:
    """Keep other runs from writing to the folder, and see that all processes mean the same one."""
    with contextlib.ExitStack() as stack:
        all_or_none(lambda: _hold(folder, stack), "jrc.save")
        all_or_none(lambda: _check_shared(folder), "jrc.save")
        yield


def _hold(folder: str, stack: contextlib.ExitStack) -> None:
    if jax.process_index() == 0:
        os.makedirs(folder, exist_ok=True)
        stack.enter_context(locked(os.path.join(folder, _LOCK)))


def _check_shared(folder: str) -> None:
    if not os.path.exists(os.path.join(folder, _LOCK)):
        raise FileNotFoundError(
            f"jrc.save: process {jax.process_index()} does not see what process 0 writes to "
            f"its {folder}. {_SHARED}"
        )


def _agreed_latest(folder: str) -> int | None:
    """The last whole save that process 0 sees."""
    seen = all_or_none(lambda: _latest(folder), "jrc.restore")
    step = int(of_all(-1 if seen is None else seen)[0])
    return None if step < 0 else step


def _latest(folder: str) -> int | None:
    """The last whole save: one that is being written has a longer name."""
    found = (re.fullmatch(rf"{_PREFIX}_(\d+)", name) for name in os.listdir(folder))
    return max((int(match[1]) for match in found if match), default=None)


def _read(folder: str, step: int, like: Any, leaves: list[_Leaf]) -> Any:
    """One whole save, checked against the leaves that are expected."""
    where = os.path.join(folder, f"{_PREFIX}_{step}")
    if not os.path.isdir(where):
        raise FileNotFoundError(
            f"jrc.restore: process {jax.process_index()} does not see the save {where}. {_SHARED}"
        )
    # No manager here: it would look at all saves, and tidy up.
    with _reader() as reader:
        _check(_read_manifest(reader, where), _manifest(leaves), where)
        wanted = {key: _abstract(x) for key, x in _stored(leaves).items()}
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
        for key, leaf in zip(_keys(leaves), leaves, strict=True)
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


def _called(leaf: _Leaf) -> str:
    return leaf.name or "(the tree itself)"


def _leaves(tree: Any) -> list[_Leaf]:
    """Every leaf in tree order; `None` counts, so that trees with and without it differ."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is None)
    return [_Leaf(jax.tree_util.keystr(p), path_name(p), leaf) for p, leaf in pairs]


def _check_type(
    leaf: _Leaf, who: str = "jrc.save", rule: str = "every leaf is an array of numbers or keys"
) -> None:
    value = leaf.value
    if value is None:
        return
    array = isinstance(value, jax.Array | np.ndarray | np.generic)
    traced = isinstance(value, jax.core.Tracer)
    if array and not traced and _is_savable(value.dtype):
        return
    what = (
        f"{type(value).__name__}[{value.dtype}]" if array else f"{type(value).__name__} {value!r}"
    )
    way_out = "Make it one with jnp.asarray, or take it out of the state."
    if traced:
        what, way_out = "traced", "Call it outside of jax.jit and the like."
    raise TypeError(f"{who}: {rule}; {_called(leaf)!r} is {what}. {way_out}")


def _check_there(leaf: _Leaf) -> None:
    """A step that donates its state leaves arrays behind that are no more."""
    if isinstance(leaf.value, jax.Array) and leaf.value.is_deleted():
        raise ValueError(
            f"jrc.save: {_called(leaf)!r} was donated to a step and is gone. Save the state that "
            "the step returned."
        )


def _check_place(leaf: _Leaf) -> None:
    """With several processes an array lies on all of them; a NumPy array lies nowhere."""
    value = leaf.value
    if jax.process_count() > 1 and isinstance(value, jax.Array) and value.is_fully_addressable:
        raise ValueError(
            f"jrc.save: in a run of {jax.process_count()} processes a jax.Array lies on all of "
            f"them; {leaf.name!r} lies on process {jax.process_index()} alone. Place it on the "
            "mesh, as jrc.init_state does, or make it a NumPy array, of which process 0's is saved."
        )


def _is_savable(dtype: Any) -> bool:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return True
    numbers = jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)
    return numbers and np.dtype(dtype).isnative


def _folder(path: str | os.PathLike[str], who: str, make: bool) -> str:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"{who}: a path is text or a pathlib.Path; got {type(path).__name__} {path!r}. Give "
            "the folder of the save, such as 'run/state'."
        )
    # `os.path` takes no text at all for the current folder, and nobody means that.
    if not os.fspath(path):
        raise ValueError(
            f"{who}: a path names the folder of the save; got {os.fspath(path)!r}. Give one, such "
            "as 'run/state', or '.' for the current folder."
        )
    # orbax takes absolute paths only, and says so late.
    folder = os.path.abspath(os.path.expanduser(path))
    above = _first_there(folder) if make else folder
    if os.path.exists(above) and not os.path.isdir(above):
        raise NotADirectoryError(
            f"{who}: a save is a folder; {above} is a file. Give another path."
        )
    if not make and not os.path.isdir(folder):
        raise FileNotFoundError(
            f"{who}: there is no folder {folder}. Give the folder that jrc.save was given."
        )
    return folder


def _first_there(folder: str) -> str:
    """The folder, or the first above it that exists."""
    while not os.path.lexists(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    return folder


def _keys(leaves: list[_Leaf]) -> list[str]:
    """Keys for orbax that keep their order and cannot clash."""
    return [f"{i:05d}.{leaf.name.replace('/', '.')}" for i, leaf in enumerate(leaves)]


def _stored(leaves: list[_Leaf]) -> dict[str, Any]:
    """What orbax gets: no arrays without elements, which it refuses, and never nothing at all.

    Of an empty array the manifest says all there is to know.
    """
    pairs = zip(_keys(leaves), leaves, strict=True)
    stored = {k: leaf.value for k, leaf in pairs if leaf.value is not None and leaf.value.size}
    return {"format": np.asarray(_FORMAT)} | stored


def _manifest(leaves: list[_Leaf]) -> list[list[Any]]:
    return [
        [leaf.place, leaf.name, list(getattr(leaf.value, "shape", ())), _dtype(leaf.value)]
        for leaf in leaves
    ]


def _kind(leaf: _Leaf) -> str:
    return f"{_dtype(leaf.value)}{list(getattr(leaf.value, 'shape', ()))}"


def _dtype(value: Any) -> str:
    return "None" if value is None else str(value.dtype)


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


def _read_manifest(reader: ocp.Checkpointer, where: str) -> list[list[Any]]:
    try:
        args = ocp.args.Composite(manifest=ocp.args.JsonRestore())
        manifest = reader.restore(where, args=args)["manifest"]
        if manifest["format"] == _FORMAT:
            return [[place, name, list(shape), dtype]
                    for place, name, shape, dtype in manifest["leaves"]]  # fmt: skip
        reason = f"its format is {manifest['format']}, this version reads {_FORMAT}"
    except (KeyError, TypeError, ValueError, OSError) as error:
        reason = f"it has no readable list of leaves ({type(error).__name__})"
    raise ValueError(
        f"jrc.restore: {where} was not made by this jrc.save: {reason}. "
        "Read it with the library that wrote it; if that was jrc.save, it is damaged, and a copy "
        "of the folder may not be."
    )


def _check(saved: list[list[Any]], wanted: list[list[Any]], folder: str) -> None:
    """Every leaf must be there in its place, with its shape and dtype."""
    old = {place: (name, shape, dtype) for place, name, shape, dtype in saved}
    new = {place: (name, shape, dtype) for place, name, shape, dtype in wanted}
    for there, here, words in ((new, old, "is not saved"), (old, new, "is not expected")):
        missing = [place for place in there if place not in here]
        if missing:
            where = missing[0] or "the top"
            raise ValueError(
                f"jrc.restore: leaf {there[missing[0]][0]!r}, at {where}, {words} "
                f"({len(missing)} such) in {folder}. Build `like` with the model and the "
                "optimizer that were saved."
            )
    for place, (name, shape, dtype) in new.items():
        if old[place][1:] != (shape, dtype):
            raise ValueError(
                f"jrc.restore: leaf {name!r} was saved as {old[place][2]}{old[place][1]}, `like` "
                f"has {dtype}{shape}. Nothing is cast or cut: build `like` as it was saved "
                "(compression state grows with the number of replicas: see jrc.reshard_dgc)."
            )
