"""Bandwidths read from text."""

import math
import re

from jrc._typing import Real
from jrc._validate import finite_number

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BITS_OR_BYTES = {"bit/s": 1 / 8, "bps": 1 / 8, "B/s": 1.0}
_TEXT = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*([kKmMgGtT]?)(i?)(bit/s|bps|B/s)\s*")


def bytes_per_second(value: Real | str, name: str) -> float:
    """Return a bandwidth in bytes per second.

    Args:
        value: A positive number of bytes per second, or text: `"1Gbit/s"`, `"25GB/s"`.
        name: The argument, for errors.

    Returns:
        Bytes per second.

    Raises:
        TypeError: When it is neither number nor text.
        ValueError: When it is not positive, or the text has no known unit.

    >>> bytes_per_second("100Mbit/s", "bandwidth"), bytes_per_second(2, "bandwidth")
    (12500000.0, 2.0)
    """
    if not isinstance(value, str):
        remedy = "Pass '1Gbit/s', or bytes per second."
        return finite_number(value, name, positive=True, remedy=remedy)
    found = _TEXT.fullmatch(value)
    if not found or (found[3] and not found[2]) or float(found[1]) == 0:
        raise ValueError(
            f"{name} as text must be a positive number and a unit of bits or bytes per "
            f"second, got {value!r}. Write '1Gbit/s', '100Mbit/s' or '25GB/s'."
        )
    prefix = _PREFIXES[found[2].lower()]
    scale = 2.0 ** (10 * round(math.log(prefix, 1000))) if found[3] else prefix
    return float(found[1]) * scale * _BITS_OR_BYTES[found[4]]
