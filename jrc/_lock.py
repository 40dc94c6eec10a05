"""One writer at a time, also among programs that know nothing of one another."""

import contextlib
import os
from collections.abc import Iterator

try:
    import fcntl
except ImportError:  # Windows has other locks
    fcntl = None


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Wait until nobody else holds the file at `path`, hold it, and remove it in the end.

    A process that is killed lets go. Where the file system has no locks, nobody waits.
    """
    descriptor = _held(path)
    try:
        yield
    finally:
        # Before it is let go: whoever waited finds that it holds a file that is gone.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.close(descriptor)


def _held(path: str) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(descriptor, path):
                return descriptor
        except OSError:
            return descriptor  # no locks here
        except BaseException:  # an interrupt while waiting
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
