"""Report files: JSON that a benchmark writes and may add to, and `benchmarks/results`."""

import json
import os
import pathlib
import sys
from typing import Any

Report = dict[str, Any]
RESULTS = pathlib.Path(__file__).parents[1] / "results"


def opened(path: pathlib.Path | None, who: str, *keys: str) -> Report:
    """Return the report in a file, to be continued; refuse a file with anything else.

    Args:
        path: The file; without one, or where it does not exist, the report is empty.
        who: The benchmark, for the error.
        keys: What every report of it has.

    Returns:
        The report.

    Raises:
        SystemExit: If the file is not JSON or lacks one of the keys.
    """
    if path is None or not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"{who}: --out must name a JSON file, got {path} ({error}). Choose another file.")
    if not isinstance(found, dict) or any(key not in found for key in keys):
        sys.exit(
            f"{who}: --out must name a report of this benchmark, got {path} without "
            f"{', '.join(keys)}. Choose another file."
        )
    return found


def write(path: pathlib.Path, report: Report) -> None:
    """Write a report; an interrupt leaves the old file or the new one, whole."""
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(report, indent=1) + "\n")
    new.replace(path)


def result(name: str) -> Report:
    """Return the report `benchmarks/results/<name>.json`."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def has_result(name: str) -> bool:
    """Return whether a file such as `peers.json` is in `benchmarks/results`."""
    return (RESULTS / name).exists()
