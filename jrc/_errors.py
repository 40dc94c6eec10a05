"""Errors of jrc: the name of the public function, the rule, what arrived and the way out.

Errors are Python's own classes (`ValueError`, `TypeError`). A check raises one without a name, and
`public` puts the name in front of it.
"""

import contextlib
import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from opcode import opmap
from types import TracebackType
from typing import Any

_PACKAGE = __name__.partition(".")[0]
_NAMED = re.compile(rf"{_PACKAGE}(\.\w+)+( \| {_PACKAGE}\.\w+)?: ")
_RUNNING: ContextVar[str] = ContextVar("running", default="")


class public:
    """Give the errors of jrc's own checks the name that a user called, once.

    >>> @public("jrc.half")
    ... def half(number: int) -> int:
    ...     return number // checked(2)

    A decorator of public functions and methods, and a context for the body of a function that they
    return. The name goes in front of errors that code of jrc raises with `raise` while the function
    runs: not of errors of a user's own function that runs inside, of JAX or of Python. Of several
    public functions that call each other the innermost one is named; an error that has a name keeps
    it. Signature, docstring, static types and tracebacks are those of the function.

    So a check takes no name. A function that a public one returns, and that users call, is
    decorated too, or has the context around its body. Where a warning, a log line or a way out has
    the name in it, write the name, or in code that several public functions share `running_name()`.
    An alias, which calls another public function, does so inside `speaking_as`.

    Args:
        name: What the user typed, `jrc.plan` or `jrc.Report.plot`.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__[F: Callable[..., Any]](self, fn: F) -> F:
        """Return the function, whose errors have the name."""
        return _with_name(fn, self.name)

    def __enter__(self) -> None:
        self._token = _RUNNING.set(self.name)

    def __exit__(self, kind: object, error: BaseException | None, at: TracebackType | None) -> None:
        _RUNNING.reset(self._token)
        if isinstance(error, Exception):
            _add_name(error, self.name)


def _with_name(fn: Any, name: str) -> Any:
    # No object in a cell: `jrc.recompute` reuses the trace of functions that capture plain values.
    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        token = _RUNNING.set(name)
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            _add_name(error, name)
            # Without the frame of this function, which tells nothing.
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            if error.__traceback__ is None and isinstance(error, TypeError):
                _name_options(error, fn, name, kwargs)
            raise
        finally:
            _RUNNING.reset(token)

    return call


def _add_name(error: Exception, name: str) -> None:
    """Put a name in front of the text of an error that jrc raised and that has none."""
    text = error.args[0] if error.args else None
    if isinstance(text, str) and not _NAMED.match(text) and _is_raised_here(error.__traceback__):
        error.args = (f"{name}: {text}", *error.args[1:])
        if isinstance(error, ImportError):  # it prints its `msg`, and no argument
            error.msg = error.args[0]


def _name_options(error: TypeError, fn: Any, name: str, given: Iterable[str]) -> None:
    """Say which options a function takes, where it was called with one that it does not take."""
    known = inspect.signature(fn).parameters
    unknown = next((key for key in given if key not in known), None)
    if unknown is None:
        return
    kinds = [each.kind for each in known.values()]
    options = [key for key, each in known.items() if each.kind is not each.VAR_POSITIONAL]
    if inspect.Parameter.KEYWORD_ONLY in kinds:
        options = [key for key in options if known[key].kind is inspect.Parameter.KEYWORD_ONLY]
    way_out = f"Its options are {', '.join(options)}."
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        way_out += (
            " Arguments of your function are positional here: bind one that is given by its name, "
            f"functools.partial(fn, {unknown}=...)."
        )
    error.args = (f"{name} takes no option {unknown!r}{close_to(unknown, options)}. {way_out}",)


def _is_raised_here(traceback: TracebackType | None) -> bool:
    """Whether a `raise` statement of this package began a traceback."""
    if traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    frame = traceback.tb_frame
    module = frame.f_globals.get("__name__", "")
    is_raise = frame.f_code.co_code[traceback.tb_lasti] == opmap["RAISE_VARARGS"]
    return is_raise and module.partition(".")[0] == _PACKAGE


def running_name() -> str:
    """Return the name of the innermost public function that runs, for warnings and log lines."""
    return _RUNNING.get() or _PACKAGE


def name_error(error: Exception) -> None:
    """Name an error at once, and not where it leaves the public function: to send its text."""
    if name := _RUNNING.get():
        _add_name(error, name)


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

    Errors name the user's function, and never the wrapper around it. Attributes are not copied: a
    method `lower` of the function is none of the wrapper.

    >>> named_like(functools.partial(max, 3))(lambda x: x).__name__
    'max'
    """

    def decorate(call: Callable[..., Any]) -> Any:
        wrapper: Any = functools.wraps(fn, updated=())(call)  # type: ignore[arg-type]
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
