"""Save: the previous save is removed only when the new one is complete."""

import contextlib
import os
from typing import Any

import numpy as np

from jrc._errors import public
from jrc._multihost import all_or_none, differing, of_all
from jrc._optional import needed
from jrc._typing import Whole
from jrc._validate import check_flag, whole_number
from jrc.persist._folder import (
    PREFIX,
    check_order,
    checked_folder,
    checked_step,
    complete_saves,
    finish_save,
    keep_unfinished,
    only_writer,
)
from jrc.persist._leaves import Leaf, check_not_donated, check_place, check_type, leaves_of
from jrc.persist._manifest import FORMAT, kind_of, manifest_of, stored


@public("jrc.save")
def save(
    path: str | os.PathLike[str],
    state: Any,
    *,
    step: Whole | None = None,
    keep: Whole = 1,
    wait: bool = True,
) -> None:
    """Save a pytree of arrays. If that fails, the previous save stays complete.

    Args:
        path: A folder on a local or mounted file system, made if needed, for this state alone. Runs
            that save to one folder at the same time wait for each other, with a warning and for
            ten minutes at most, and the last save stays.
            Several processes give the same folder, on a file system that they share. The empty
            file `.jrc_lock` stays in it.
        state: A pytree whose leaves are all arrays (any shape, dtype and sharding, typed keys
            too), for instance a `jrc.TrainState`. Per-replica state is saved for every replica. In
            a run of several processes every process calls `save`; of a NumPy array the value on
            process 0 is saved.
        step: The number of this save, larger than that of the last one; one more if left out. It
            is how `jrc.restore` finds a save that is not the last.
        keep: How many saves stay in the folder, this one included; older ones are removed.
        wait: Whether to return when the save is complete. With `False` that is when its arrays are
            copied, and the files are written meanwhile. The next save to the folder, or restore
            from it, waits for that and raises its error; until then the folder is locked for other
            runs. A program that ends earlier loses this save, and not the one before: let its last
            save wait.

    Raises:
        ModuleNotFoundError: If orbax is not installed.
        TypeError: If a leaf is not an array, `path` is not a path, or a number is none.
        NotADirectoryError: If `path` is a file.
        ValueError: If `path` is a URL, an array was donated, the processes of a run have different
            trees, a `jax.Array` lies on one process only, or a number is out of its range.
        OSError: If the folder cannot be made or written to.
        TimeoutError: If another run keeps the folder locked.
        FileNotFoundError: If a process does not see the folder of process 0.
        RuntimeError: If another process of the run failed; the text is that of its error.

    Example:
        >>> import jax.numpy as jnp, tempfile
        >>> state = {"w": jnp.arange(3.0)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     jrc.save(folder, state, step=10, keep=3)
        ...     jrc.restore(folder, state)["w"].tolist()
        [0.0, 1.0, 2.0]

    Source: orbax-checkpoint.
    """
    ocp = needed("orbax.checkpoint")
    check_order(path, state, "state")
    leaves = leaves_of(state)
    check_flag(wait, "wait")
    keep = whole_number(keep, "keep", least=1, remedy="Write keep=1.")
    if step is not None:
        step = checked_step(step)
    folder = all_or_none(lambda: _checked_for_save(path, leaves))
    if differing([(f"{leaf.place}: {kind_of(leaf)}", 0) for leaf in leaves]):
        raise ValueError(
            "state must have the same tree, shapes and dtypes on every process, got "
            "different ones. Call jrc.save with the whole state on every process."
        )
    finish_save(folder)
    arrays = stored(leaves)
    if not wait:  # a step may donate jax.Arrays, which stay; the program may write to NumPy's
        arrays = {k: np.array(x) if isinstance(x, np.ndarray) else x for k, x in arrays.items()}
    args = ocp.args.Composite(
        arrays=ocp.args.StandardSave(arrays),
        manifest=ocp.args.JsonSave({"format": FORMAT, "leaves": manifest_of(leaves)}),
    )
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        step_prefix=PREFIX,
        enable_async_checkpointing=not wait,
        cleanup_tmp_directories=True,  # left by a save that was killed
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(only_writer(folder))
        # Before the manager, which begins to remove what killed saves left, and ends in its save.
        number = _number(step, complete_saves(folder))
        manager = ocp.CheckpointManager(folder, options=options)
        # Twice: the first time raises the error of a save, while files may still be written.
        stack.callback(manager.close)
        stack.callback(manager.close)
        manager.save(number, args=args, force=True)
        if not wait:
            keep_unfinished(folder, stack.pop_all())


def _number(step: int | None, saved: list[int]) -> int:
    """Return the number of a save behind the last one."""
    # What process 0 sees: on other processes a save may appear later.
    latest = int(of_all(saved[-1] if saved else -1)[0])
    step = int(of_all(-1 if step is None else step)[0])
    if 0 <= step <= latest:
        raise ValueError(
            f"step must be larger than that of the last save, got {step} after {latest}. "
            "Give another folder, or leave step out."
        )
    return latest + 1 if step < 0 else step


def _checked_for_save(path: Any, leaves: list[Leaf]) -> str:
    """Return the folder after a check of path and leaves."""
    for leaf in leaves:
        check_type(leaf)
        check_not_donated(leaf)
        check_place(leaf)
    return checked_folder(path, make=True)
