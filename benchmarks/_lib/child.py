"""A benchmark's module run in a process of its own: settings go in, JSON lines come out.

The module reads `settings()` and writes its results with `answer`.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]


def results_of(module: str, settings: Any, env: Mapping[str, str] | None = None) -> Iterator[Any]:
    """Run a module and yield its results as they come.

    Args:
        module: The module below `benchmarks`: `memory._resident`.
        settings: Anything that JSON takes; the module's `settings()`.
        env: Environment variables to set for it.

    Yields:
        Each value that the module passes to `answer`.

    Raises:
        RuntimeError: If it fails, with what it wrote to standard error.
    """
    command = [sys.executable, "-m", f"benchmarks.{module}", json.dumps(settings)]
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT,
            env={**os.environ, **(env or {})},
        ) as process:  # fmt: skip
            for line in process.stdout or ():
                yield json.loads(line)
        if process.returncode:
            errors.seek(0)
            raise RuntimeError(f"benchmarks.{module} failed:\n{errors.read()}")


def settings() -> Any:
    """Return what the parent passed to `results_of`."""
    return json.loads(sys.argv[1])


def answer(result: Any) -> None:
    """Send one result to the parent."""
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
