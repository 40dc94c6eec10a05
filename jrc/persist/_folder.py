"""The folder of a save: where it is, who writes to it, and the last whole save in it."""

import contextlib
import os
import re
from collections.abc import Iterator

import jax

from jrc._lock import locked
from jrc._multihost import all_or_none

# Saves are folders `jrc_0`, `jrc_1`, …: nobody else's folders are counted, read or removed.
PREFIX = "jrc"

# Held by process 0 while it saves.
LOCK = ".jrc_lock"

SHARED = "Give every process the same folder, on a file system that they share."


def checked_folder(path: str | os.PathLike[str], who: str, make: bool) -> str:
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


@contextlib.contextmanager
def only_writer(folder: str) -> Iterator[None]:
    """Keep other runs from writing to the folder, and see that all processes mean the same one."""
    with contextlib.ExitStack() as stack:
        all_or_none(lambda: _hold(folder, stack), "jrc.save")
        all_or_none(lambda: _check_shared(folder), "jrc.save")
        yield


def _hold(folder: str, stack: contextlib.ExitStack) -> None:
    if jax.process_index() == 0:
        try:
            os.makedirs(folder, exist_ok=True)
            stack.enter_context(locked(os.path.join(folder, LOCK)))
        except OSError as error:
            # With its number the text of an error would be that of the system again.
            raise type(error)(_unwritable(folder, error.strerror or str(error))) from error
        except ValueError as error:  # characters that no file system takes
            raise ValueError(_unwritable(ascii(folder), str(error))) from error


def _unwritable(folder: str, reason: str) -> str:
    return (
        f"jrc.save: the folder of a save is made and written to; {folder} cannot be: {reason}. "
        "Give another, or change who may write to it."
    )


def _check_shared(folder: str) -> None:
    if not os.path.exists(os.path.join(folder, LOCK)):
        raise FileNotFoundError(
            f"jrc.save: process {jax.process_index()} does not see what process 0 writes to "
            f"its {folder}. {SHARED}"
        )


def latest(folder: str) -> int | None:
    """The last whole save: one that is being written has a longer name."""
    found = (re.fullmatch(rf"{PREFIX}_(\d+)", name) for name in os.listdir(folder))
    return max((int(match[1]) for match in found if match), default=None)
