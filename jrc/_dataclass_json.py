"""Frozen dataclasses as JSON text, which is read again as it was written or refused.

>>> import dataclasses
>>> @dataclasses.dataclass(frozen=True)
... class Point:
...     x: int
...     names: tuple[str, ...] = ()
>>> text = json_text(Point(3, ("a",)), "point/1")
>>> from_json_text(Point, text, "point/1")
Point(x=3, names=('a',))
>>> from_json_text(Point, text.replace("3", "4"), "point/1")
Traceback (most recent call last):
ValueError: a text that was changed after it was written
"""

import dataclasses
import hashlib
import itertools
import json
import types
import typing
from typing import Any


def json_text(value: Any, format: str, **more: Any) -> str:
    """Return a dataclass as JSON, with its format and a hash of all entries.

    Args:
        value: Its fields are numbers, text, `None`, tuples of these, and dataclasses.
        format: What wrote it; `from_json_text` reads this format alone.
        **more: Further entries for readers of the text; they follow from the fields.
    """
    data = {"format": format, **more, **_data_of(value)}
    return json.dumps({**data, "sha256": _sha256(data)})


def from_json_text[T](kind: type[T], text: str, format: str) -> T:
    """Return the dataclass that `json_text` wrote.

    White space and the order of entries do not matter; how numbers are written does.

    Raises:
        ValueError: If the text is something else, of another format, or was changed.
    """
    try:
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ValueError(f"{type(data).__name__}, not an object")
        if data.get("format") != format:
            raise ValueError(f"format {data.get('format')!r:.80}")
        if data.pop("sha256", None) != _sha256(data):
            raise ValueError("a text that was changed after it was written")
        return _read(kind, data)
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _data_of(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_data_of(each) for each in value]
    if not dataclasses.is_dataclass(value):
        return value
    fields = {x.name: _data_of(getattr(value, x.name)) for x in dataclasses.fields(value)}
    # Of several classes without fields only the name is different.
    return fields or type(value).__name__


def _sha256(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _read(kind: Any, data: Any) -> Any:
    """Return what `_data_of` wrote of a value of this kind."""
    if isinstance(kind, types.UnionType):
        kind = _one_of(typing.get_args(kind), data)
    if dataclasses.is_dataclass(kind):
        kinds = typing.get_type_hints(kind)
        names = [field.name for field in dataclasses.fields(kind)]
        return kind(**{name: _read(kinds[name], data[name]) for name in names})  # type: ignore[operator]
    if typing.get_origin(kind) is tuple:
        first, *rest = typing.get_args(kind)
        kinds = itertools.repeat(first) if rest == [...] else (first, *rest)
        return tuple(map(_read, kinds, data))
    return data


def _one_of(kinds: tuple[Any, ...], data: Any) -> Any:
    """Return the dataclass among these kinds that the data is of; `None` if it is of none."""
    for kind in filter(dataclasses.is_dataclass, kinds):
        names = {field.name for field in dataclasses.fields(kind)}
        if data == kind.__name__ if not names else isinstance(data, dict) and set(data) == names:
            return kind
    return None
