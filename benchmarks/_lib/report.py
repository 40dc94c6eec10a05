"""Report files: JSON that a benchmark writes and may add to, and `benchmarks/results`."""

import json
import os
import pathlib
import sys
from collections.abc import Sequence
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


def opened_parts(folder: pathlib.Path | None, who: str, names: Sequence[str], *keys: str) -> Report:
    """Return the report whose parts are files of a folder: `{name: part}`, and `toy` of one.

    Args:
        folder: The folder; without one, or where no file exists, the report is empty.
        who: The benchmark, for the error.
        names: The parts; each is the file `<name>.json`.
        keys: What every part has.
    """
    found = {name: opened(folder and folder / f"{name}.json", who, *keys) for name in names}
    found = {name: part for name, part in found.items() if part}
    toy = [part["toy"] for part in found.values() if "toy" in part]
    return {**found, **({"toy": toy[0]} if toy else {})}


def write_parts(folder: pathlib.Path, report: Report, names: Sequence[str]) -> None:
    """Write each part that a report has into its file of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if name in report:
            write(folder / f"{name}.json", {"toy": report["toy"], **report[name]})


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
