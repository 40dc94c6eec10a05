"""What benchmarks share of reports: the file that one goes on with, and rows for a terminal."""

import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table


def opened(path: pathlib.Path | None, script: str, *names: str) -> dict[str, Any]:
    """The report that a file holds already; a file that holds anything else is not touched.

    Args:
        path: The file; nothing is known where there is none.
        script: Whose report it is.
        names: What every report of it has.
    """
    if path is None or not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"{script}: {path} is no whole JSON file ({error}); choose another --out.")
    if not isinstance(found, dict) or any(name not in found for name in names):
        sys.exit(f"{script}: {path} holds no report of this script; choose another --out.")
    return found


def terminal_table(title: str, rows: Sequence[Sequence[str]]) -> Table:
    """Rows, of which the first has the names of the columns; without a name it has words."""
    head, *body = rows
    table = Table(title=title, box=SIMPLE_HEAD)
    for name in head:
        table.add_column(name, justify="right" if name else "left")
    for row in body:
        table.add_row(*map(escape, row))
    return table
