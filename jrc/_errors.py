"""How an error speaks: the rule, what arrived, the way out.

Errors are Python's own classes (`ValueError`, `TypeError`), so that users catch what they know.
"""

import difflib
from collections.abc import Iterable


def listed(names: Iterable[str], none: str = "none") -> str:
    """Names for a sentence: `'a', 'b'`, or the word for no names at all."""
    return ", ".join(repr(name) for name in names) or none


def close_to(name: str, known: Iterable[str]) -> str:
    """A hint such as ` (did you mean 'fc_1'?)`, empty when nothing known comes close."""
    close = difflib.get_close_matches(name, list(known), n=3)
    return f" (did you mean {listed(close)}?)" if close else ""


def name_of(function: object) -> str:
    """What a user calls this function: its own name, through `functools.partial` and objects."""
    inner = getattr(function, "func", function)
    return getattr(inner, "__name__", None) or type(inner).__name__
