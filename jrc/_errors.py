"""How an error speaks: the rule, what arrived, the way out.

Errors are Python's own classes (`ValueError`, `TypeError`), so that users catch what they know.
"""

import contextlib
import difflib
from collections.abc import Iterable, Iterator


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


@contextlib.contextmanager
def speaking_as(who: str, inner: str) -> Iterator[None]:
    """Errors of a function that a thin one calls, under the name that the user typed.

    >>> with speaking_as("jrc.thin", "jrc.thick"):
    ...     raise ValueError("jrc.thick: no.")
    Traceback (most recent call last):
    ValueError: jrc.thin: no.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        text = str(error)
        if text.startswith(f"{inner}: "):
            error.args = (who + text.removeprefix(inner), *error.args[1:])
        raise
