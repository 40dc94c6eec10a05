"""Keep the log of a compiler from the user's terminal while it compiles for an absent device.

Compilers write their log to file descriptor 2, at a level that they read before Python can set it.
What they report there (no device to tune on, a program that is too large) is known or raised.
"""

import contextlib
import os
import re
import selectors
import threading
import warnings
from collections.abc import Iterator

# The head of a line of absl's log: `W1122 21:23:35.490409   11302 sort_rewriter.cc:798] `.
_LOG_LINE = re.compile(rb"[IWE]\d{4} \d{2}:\d{2}:\d{2}\.\d+\s")
_STDERR = 2
_ONE_AT_A_TIME = threading.Lock()


def without_log(written: bytes) -> bytes:
    r"""Return what was written to standard error without the lines of a compiler's log.

    >>> without_log(b"mine\nW1122 21:23:35.490409   113 a.cc:7] slow.\nTo avoid this\n")
    b'mine\n'
    """
    passed = []
    for line in written.splitlines(keepends=True):
        if _LOG_LINE.match(line):
            break  # messages have several lines, and are written at once
        passed.append(line)
    return b"".join(passed)


@contextlib.contextmanager
def quiet_compiler() -> Iterator[None]:
    """Pass on what is written to standard error, except a compiler's log.

    JAX's persistent cache cannot read a program for an absent device. Its warning is silenced.
    """
    if not _ONE_AT_A_TIME.acquire(blocking=False):
        yield
        return
    try:
        with _redirected(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Error reading persistent compilation cache entry")
            yield
    finally:
        _ONE_AT_A_TIME.release()


@contextlib.contextmanager
def _redirected() -> Iterator[None]:
    try:
        real = os.dup(_STDERR)
    except OSError:  # the process has no standard error
        yield
        return
    (read, write), (is_over, end) = os.pipe(), os.pipe()
    all_passed = threading.Event()
    args = read, real, is_over, all_passed
    reader = threading.Thread(target=_pass_on, args=args, name="jrc: stderr", daemon=True)
    os.dup2(write, _STDERR)
    os.close(write)
    reader.start()
    try:
        yield
    finally:
        os.dup2(real, _STDERR)
        os.write(end, b"\0")
        all_passed.wait()
        os.close(is_over)
        os.close(end)


def _pass_on(read: int, real: int, is_over: int, all_passed: threading.Event) -> None:
    """Pass on what comes through a pipe; set `all_passed` once the block is over and it is empty.

    A process that the block started may still write to the pipe. That is passed on as it is, until
    the last such process ends, and nothing waits for it.
    """
    try:
        with selectors.DefaultSelector() as pipes:
            pipes.register(read, selectors.EVENT_READ)
            pipes.register(is_over, selectors.EVENT_READ)
            while True:
                ready = [key.fd for key, _ in pipes.select()]
                if read in ready:
                    if not (written := os.read(read, 1 << 16)):  # as much as a pipe can have
                        break
                    with contextlib.suppress(OSError):
                        os.write(real, written if all_passed.is_set() else without_log(written))
                if is_over in ready:
                    pipes.unregister(is_over)
                    all_passed.set()
    finally:
        all_passed.set()
        os.close(read)
        os.close(real)
