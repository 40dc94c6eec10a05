"""Quantities as text: bandwidths read, bytes and seconds written."""

import math
import operator
import re

import numpy as np

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BITS_OR_BYTES = {"bit/s": 1 / 8, "bps": 1 / 8, "B/s": 1.0}
_TEXT = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*([kKmMgGtT]?)(i?)(bit/s|bps|B/s)\s*")


def bytes_per_second(value: float | str, name: str, who: str) -> float:
    """A bandwidth in bytes per second.

    Args:
        value: A positive number of bytes per second, or text: `"1Gbit/s"`, `"25GB/s"`.
        name: The argument, for errors.
        who: The public function, for errors.

    Returns:
        Bytes per second.

    Raises:
        TypeError: When it is neither number nor text.
        ValueError: When it is not positive, or the text has no unit that is known.

    >>> bytes_per_second("100Mbit/s", "bandwidth", "jrc"), bytes_per_second(2, "bandwidth", "jrc")
    (12500000.0, 2.0)
    """
    if not isinstance(value, str):
        return checked_number(value, name, who, "'1Gbit/s', or bytes per second", positive=True)
    found = _TEXT.fullmatch(value)
    if not found or (found[3] and not found[2]) or float(found[1]) == 0:
        raise ValueError(
            f"{who}: {name} as text is a positive number and a unit, such as '1Gbit/s', "
            f"'100Mbit/s' or '25GB/s'; got {value!r}"
        )
    prefix = _PREFIXES[found[2].lower()]
    scale = 2.0 ** (10 * round(math.log(prefix, 1000))) if found[3] else prefix
    return float(found[1]) * scale * _BITS_OR_BYTES[found[4]]


def checked_number(
    value: float, name: str, who: str, hint: str, *, positive: bool = False
) -> float:
    """A finite number, not negative or even positive; `hint` says what to pass."""
    known = isinstance(value, int | float | np.integer | np.floating)
    if not known or isinstance(value, bool):
        raise TypeError(f"{who}: {name} must be a number, got {value!r}; pass {hint}")
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        rule = "positive" if positive else ">= 0"
        raise ValueError(f"{who}: {name} must be finite and {rule}, got {value!r}; pass {hint}")
    return float(value)


def checked_whole(value: int, name: str, who: str) -> int:
    """A whole number from 1."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{who}: {name} must be an int, got {value!r}; pass mesh.shape['data']")
    if (number := operator.index(value)) < 1:
        raise ValueError(f"{who}: {name} must be at least 1, got {number}; pass mesh.shape['data']")
    return number
