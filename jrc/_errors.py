"""Parts of error messages, which give the rule, what arrived and the way out.

Errors are Python's own classes (`ValueError`, `TypeError`).
"""

import contextlib
import difflib
from collections.abc import Iterable, Iterator


def listed(names: Iterable[str], none: str = "none") -> str:
    """Return names as text: `'a', 'b'`, or `none` if there are no names."""
    return ", ".join(repr(name) for name in names) or none


def close_to(name: str, known: Iterable[str]) -> str:
    """Return a hint such as ` (did you mean 'fc_1'?)`, empty if no known name is close."""
    close = difflib.get_close_matches(name, list(known), n=3)
    return f" (did you mean {listed(close)}?)" if close else ""


def name_of(function: object) -> str:
    """Return the name of a function, of the inner one for `functools.partial`."""
    inner = getattr(function, "func", function)
    return getattr(inner, "__name__", None) or type(inner).__name__


@contextlib.contextmanager
def speaking_as(who: str, inner: str, **arguments: str) -> Iterator[None]:
    """Replace the name of a called function in errors by that of its public caller.

    Args:
        who: The caller.
        inner: The function that it calls.
        **arguments: Of an alias of `inner` with other names of arguments: its name for each. A
            way out that calls `inner` then calls `who`.

    >>> with speaking_as("jrc.thin", "jrc.thick"):
    ...     raise ValueError("jrc.thick: no.")
    Traceback (most recent call last):
    ValueError: jrc.thin: no.
    >>> with speaking_as("jrc.cells", "jrc.modules", module="cell"):
    ...     raise ValueError("jrc.modules: module must be one. Write jrc.modules(net).")
    Traceback (most recent call last):
    ValueError: jrc.cells: cell must be one. Write jrc.cells(net).
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        text = str(error)
        if text.startswith(f"{inner}: "):
            text = who + text.removeprefix(inner)
            for old, new in arguments.items():
                text = text.replace(f"{who}: {old} ", f"{who}: {new} ").replace(
                    f"{inner}(", f"{who}("
                )
            error.args = (text, *error.args[1:])
        raise
