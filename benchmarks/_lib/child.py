"""A benchmark's module run in a process of its own: settings go in, results come out.

The module reads `settings()` and writes its results with `answer`: lines of JSON behind a mark, so
that what a library prints is no result. A `Worker` stays, and answers one request after another.
"""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    late = threading.Event()
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            _command(module, settings), stdout=subprocess.PIPE, stderr=errors, text=True,
            cwd=ROOT, env={**os.environ, **(env or {})},
        ) as process, _ended(process, limit, late):  # fmt: skip
            yield from _answers(process.stdout or ())
            process.wait()
        if late.is_set():
            raise TimeoutError(f"benchmarks.{module} ran for longer than {limit:.0f} s.")
        if process.returncode:
            errors.seek(0)
            raise RuntimeError(f"benchmarks.{module} failed:\n{errors.read()}")


class Worker:
    """A module in a process of its own that answers requests until it is closed.

    It calls `serve`. Workers wait while others run, so that programs can be timed in turns.

    Args:
        module: The module below `benchmarks`.
        settings: Anything that JSON takes; the module's `settings()`.
    """

    def __init__(self, module: str, settings: Any) -> None:
        self._module = module
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            _command(module, settings), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors, text=True, cwd=ROOT,
        )  # fmt: skip
        self._answers = _answers(self._process.stdout or ())

    def ask(self) -> Any:
        """Return the next answer.

        Raises:
            RuntimeError: If the process ended instead, with what it wrote to standard error.
        """
        with contextlib.suppress(BrokenPipeError):
            print(file=self._process.stdin, flush=True)
        for found in self._answers:
            return found
        self._errors.seek(0)
        raise RuntimeError(f"benchmarks.{self._module} failed:\n{self._errors.read()}")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _command(module: str, settings: Any) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.{module}", json.dumps(settings)]


def _answers(lines: Iterable[str]) -> Iterator[Any]:
    for line in lines:
        # A process that is killed may leave half a line.
        if line.startswith(_MARK) and line.endswith("\n"):
            yield json.loads(line.removeprefix(_MARK))


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


def serve(run: Callable[[], Any]) -> None:
    """Answer each request of the `Worker` with what a function returns."""
    for _ in sys.stdin:
        answer(run())
