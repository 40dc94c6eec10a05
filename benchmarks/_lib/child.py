"""A benchmark's module run in a process of its own: settings go in, results come out.

The module reads `settings()` and writes its results with `answer`: lines of JSON behind a mark, so
that what a library prints is no result.
"""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
_MARK = "result: "


def results_of(
    module: str, settings: Any, env: Mapping[str, str] | None = None, limit: float | None = None
) -> Iterator[Any]:
    """Run a module and yield its results as they come.

    The process ends with the iterator: one that is closed early ends it.

    Args:
        module: The module below `benchmarks`: `memory._resident`.
        settings: Anything that JSON takes; the module's `settings()`.
        env: Environment variables to set for it.
        limit: Seconds that it may run.

    Yields:
        Each value that the module passes to `answer`.

    Raises:
        RuntimeError: If it fails, with what it wrote to standard error.
        TimeoutError: If it ran for longer than `limit`; its results until then were yielded.
    """
    command = [sys.executable, "-m", f"benchmarks.{module}", json.dumps(settings)]
    late = threading.Event()
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT,
            env={**os.environ, **(env or {})},
        ) as process, _ended(process, limit, late):  # fmt: skip
            for line in process.stdout or ():
                # A process that is killed may leave half a line.
                if line.startswith(_MARK) and line.endswith("\n"):
                    yield json.loads(line.removeprefix(_MARK))
            process.wait()
        if late.is_set():
            raise TimeoutError(f"benchmarks.{module} ran for longer than {limit:.0f} s.")
        if process.returncode:
            errors.seek(0)
            raise RuntimeError(f"benchmarks.{module} failed:\n{errors.read()}")


@contextlib.contextmanager
def _ended(
    process: subprocess.Popen[str], limit: float | None, late: threading.Event
) -> Iterator[None]:
    """Kill a process after `limit` seconds, and when the body is left while it runs."""

    def stop() -> None:
        if process.poll() is None:
            late.set()
            process.kill()

    timer = threading.Timer(limit, stop) if limit is not None else None
    if timer:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        if timer:
            timer.cancel()
        if process.poll() is None:
            process.kill()


def settings() -> Any:
    """Return what the parent passed to `results_of`."""
    return json.loads(sys.argv[1])


def answer(result: Any) -> None:
    """Send one result to the parent."""
    sys.stdout.write(f"{_MARK}{json.dumps(result)}\n")
    sys.stdout.flush()
