"""The file to which a benchmark writes, and with which it goes on."""

import json
import pathlib
import sys
from typing import Any


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
