"""Parts of error messages, which give the rule, what arrived and the way out.

Errors are Python's own classes (`ValueError`, `TypeError`).
"""

import contextlib
import difflib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any


def listed(names: Iterable[str], none: str = "none") -> str:
    """Return names as text: `'a', 'b'`, or `none` if there are no names."""
    return ", ".join(repr(name) for name in names) or none


def close_to(name: str, known: Iterable[str]) -> str:
    """Return a hint such as ` (did you mean 'fc_1'?)`, empty if no known name is close."""
    close = difflib.get_close_matches(name, list(known), n=3)
    return f" (did you mean {listed(close)}?)" if close else ""


def name_of(function: object) -> str:
    """Return the name of a function, of the inner one for `functools.partial`."""
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    return getattr(inner, "__name__", None) or type(inner).__name__


def named_like(fn: object) -> Callable[[Callable[..., Any]], Any]:
    """Return the decorator `functools.wraps(fn)`, for which a partial and an object have names.

    Errors name the user's function, and never the wrapper around it.

    >>> named_like(functools.partial(max, 3))(lambda x: x).__name__
    'max'
    """

    def decorate(call: Callable[..., Any]) -> Any:
        wrapper: Any = functools.wraps(fn)(call)  # type: ignore[arg-type]
        wrapper.__name__ = name_of(fn)
        return wrapper

    return decorate


def some_of(names: Sequence[str], most: int = 3) -> str:
    """Return the first of some names as text, and the number of the others.

    >>> some_of(["a", "b", "c", "d"], most=2)
    "'a', 'b' and 2 more"
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return listed(names[:most]) + more


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
