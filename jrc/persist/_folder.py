"""The folder of a save: its path, the lock for writing to it, and the last complete save in it."""

import contextlib
import errno
import logging
import os
import pathlib
import re
import secrets
from collections.abc import Iterator
from typing import Any

import filelock
import jax

from jrc._errors import running_name
from jrc._multihost import all_or_none, of_all
from jrc._text import brief
from jrc._validate import whole_number

# Saves are folders `jrc_0`, `jrc_1`, …: other folders are neither counted, read nor removed.
PREFIX = "jrc"

# Locked by process 0 while it saves. The file stays: to remove it would part those that wait for
# it from those that make it, https://py-filelock.readthedocs.io.
LOCK = ".jrc_lock"

# Written by process 0 so that the others can tell whether they see the same folder.
MARKER = ".jrc_writer"

# How long a run waits for another one that saves to its folder: without a word, and in all.
SECONDS_UNTOLD = 2.0
SECONDS_AT_MOST = 600.0

SHARED = "Give every process the same folder, on a file system that they share."

# `gs://bucket/run`, and `gs:/bucket/run`, which `pathlib.Path` makes of it. No Windows drive.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")

# What a file system without locks answers.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP}

# Saves of this process that are being written: orbax's manager and the lock of each folder.
_UNFINISHED: dict[str, contextlib.ExitStack] = {}

_logger = logging.getLogger("jrc")


def check_order(path: Any, tree: Any, name: str) -> None:
    """Raise if the path stands in the place of the tree, and the tree in its place."""
    if isinstance(tree, str | os.PathLike) and not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"path must come before {name}, got {type(path).__name__} and then "
            f"{type(tree).__name__} {str(tree)!r}. Write {running_name()}({str(tree)!r}, {name})."
        )


def checked_folder(path: Any, make: bool) -> str:
    """Return the absolute path of the folder of a save; with `make` it need not exist yet."""
    name = _checked_name(path)
    # orbax takes absolute paths only, and reports others late.
    folder = os.path.abspath(os.path.expanduser(name))
    above = _first_existing(folder) if make else folder
    if os.path.exists(above) and not os.path.isdir(above):
        raise NotADirectoryError(
            f"path must be a folder, got {folder}, where {above} is a file. Give another path."
        )
    if not make and not os.path.isdir(folder):
        raise FileNotFoundError(
            f"path must be the folder of a save, got {folder}, which does not exist. Give "
            "the folder that was given to jrc.save."
        )
    return folder


def checked_step(step: Any) -> int:
    """Return the number of a save, or raise if it is none that can be sent to other processes."""
    return whole_number(step, "step", least=0, most=2**31 - 1, remedy="Leave it out.")


def _checked_name(path: Any) -> str:
    """Return the path as text, or raise if it is no path on a local or mounted file system."""
    name = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(name, str):
        raise TypeError(
            f"path must be a str or a pathlib.Path, got {type(path).__name__} "
            f"{brief(path, most=3)}. "
            "Give the folder of the save, such as 'run/state'."
        )
    if not name:
        raise ValueError(
            f"path must name the folder of the save, got {name!r}. Give one, such as "
            "'run/state', or '.' for the current folder."
        )
    if _URL.match(name):
        raise ValueError(
            f"path must be a folder on a local or mounted file system, got the URL "
            f"{name!r}. Mount the bucket (gcsfuse, s3fs), or use orbax.checkpoint, which takes "
            "URLs."
        )
    return name


def _first_existing(folder: str) -> str:
    """Return the folder, or the first above it that exists."""
    while not os.path.lexists(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    return folder


@contextlib.contextmanager
def only_writer(folder: str) -> Iterator[None]:
    """Keep other runs from writing to the folder, and check that all processes see the same one."""
    with contextlib.ExitStack() as stack:
        all_or_none(lambda: _lock(folder, stack))
        _check_shared(folder)
        yield


def _lock(folder: str, stack: contextlib.ExitStack) -> None:
    """Make the folder and lock it, on process 0; a run that has locked it is waited for."""
    if jax.process_index() != 0:
        return
    try:
        os.makedirs(folder, exist_ok=True)
        stack.enter_context(_acquired(folder))
    except filelock.Timeout:
        raise TimeoutError(
            f"path must be a folder to which no other run saves, got {folder}, which "
            f"another run has kept locked for {SECONDS_AT_MOST:g} s. Give each run a folder of its "
            "own, or end a run that is stopped in the middle of a save."
        ) from None
    except OSError as error:
        if error.errno in _NO_LOCKS:
            _logger.warning(
                "jrc.save: the file system of %s has no locks (%s). Let one run at a time save "
                "there.", folder, error.strerror,
            )  # fmt: skip
            return
        # With its number, the text of an OSError would be replaced by the system's.
        raise type(error)(_unwritable(folder, error.strerror or str(error))) from error
    except ValueError as error:  # characters that no file system takes
        raise ValueError(_unwritable(ascii(folder), str(error))) from error


def _acquired(folder: str) -> contextlib.AbstractContextManager[Any]:
    """Return the acquired lock of a folder.

    Raises:
        filelock.Timeout: If another run keeps it too long.
    """
    lock = filelock.FileLock(os.path.join(folder, LOCK))
    try:
        return lock.acquire(timeout=SECONDS_UNTOLD)
    except filelock.Timeout:
        _logger.warning(
            "jrc.save: another run saves to %s. Waiting for it, at most %g s.",
            folder, SECONDS_AT_MOST,
        )  # fmt: skip
    return lock.acquire(timeout=SECONDS_AT_MOST - SECONDS_UNTOLD)


def _unwritable(folder: str, reason: str) -> str:
    return (
        f"path must be a folder that can be made and written to, got {folder}: {reason}. "
        "Give another, or change its permissions."
    )


def _check_shared(folder: str) -> None:
    """Raise on all processes if one of them does not see what process 0 writes to the folder."""
    if jax.process_count() == 1:
        return
    marker = pathlib.Path(folder, MARKER)
    token = str(of_all(secrets.randbits(31))[0])

    def write() -> None:
        if jax.process_index() == 0:
            marker.write_text(token)

    def read() -> None:
        if not marker.is_file() or marker.read_text() != token:
            raise FileNotFoundError(
                f"path must be one folder for all processes, got {folder}, in which "
                f"process {jax.process_index()} does not see what process 0 writes. {SHARED}"
            )

    all_or_none(write)
    try:
        all_or_none(read)
    finally:
        if jax.process_index() == 0:
            marker.unlink(missing_ok=True)


def keep_unfinished(folder: str, save: contextlib.ExitStack) -> None:
    """Remember a save that is being written, with its lock, until `finish_save`."""
    _UNFINISHED[folder] = save


def finish_save(folder: str) -> None:
    """Wait for the save of this process that is being written to a folder, and raise its error."""
    if save := _UNFINISHED.pop(folder, None):
        save.close()


def complete_saves(folder: str) -> list[int]:
    """Return the numbers of complete saves; one that is being written has a longer name."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_dir()]
    found = (re.fullmatch(rf"{PREFIX}_(\d+)", name) for name in names)
    return sorted(int(match[1]) for match in found if match)
