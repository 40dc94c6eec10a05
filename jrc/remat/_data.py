"""The text of a plan or report, looked through before one is made of it: it may have been edited.

>>> check_numbers({"kept": [{"bytes": -1}]}, {"kept": [{"bytes": int}]})
Traceback (most recent call last):
ValueError: kept[0].bytes is -1, not a whole number from 0
"""

import math
from typing import Any

_WORDS = {int: "a whole number from 0", float: "a number from 0", str: "text"}


def check_data(data: Any, format: object, fields: dict[str, Any]) -> None:
    """Raise a `ValueError` that says which entry is missing or not of its kind."""
    if not isinstance(data, dict):
        raise ValueError(f"{type(data).__name__}, not an object")
    # Before all else: another format has other entries.
    if "format" not in data or data["format"] != format:
        raise ValueError(f"format {data.get('format')!r}")
    check_numbers(data, fields)


def check_numbers(data: Any, kind: Any, name: str = "") -> None:
    """Raise a `ValueError` that names an entry which is missing or not of its kind."""
    if isinstance(kind, dict):
        if not isinstance(data, dict):
            raise ValueError(f"{name} is {data!r}, not an object")
        for key, each in kind.items():
            here = f"{name}.{key}" if name else key
            if key not in data:
                raise ValueError(f"{here} is missing")
            check_numbers(data[key], each, here)
    elif isinstance(kind, list):
        if not isinstance(data, list):
            raise ValueError(f"{name} is {data!r}, not a list")
        for i, each in enumerate(data):
            check_numbers(each, kind[0], f"{name}[{i}]")
    elif not _is(data, kind):
        raise ValueError(f"{name} is {data!r}, not {_WORDS[kind]}")


def _is(value: object, kind: type) -> bool:
    if kind is str:
        return isinstance(value, str)
    kinds = (int,) if kind is int else (int, float)
    number = isinstance(value, kinds) and not isinstance(value, bool)
    return number and 0 <= value < math.inf  # type: ignore[operator]
