"""TARGET of the command line: the module, the function in it, and what that returns."""

import ast
import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import pathlib
import re
import sys
import zlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from jrc._errors import close_to, listed, name_of


class UsageError(Exception):
    """The command is wrong: an option, a target or a path."""


class Target(NamedTuple):
    """What TARGET names.

    Attributes:
        fn: The function to differentiate.
        args: Its arguments.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]


def load(name: str, settings: Sequence[str], failures: list[BaseException], *first: Any) -> Target:
    """Return the function and its arguments that TARGET names.

    Args:
        name: `module:function` or `file.py:function`.
        settings: Keyword arguments for the named function, each as `KEY=VALUE`.
        failures: Gets every exception of the user's code: on import, of the named function, and of
            the function that it returns.
        *first: Arguments for the named function, before the keyword arguments.

    Raises:
        UsageError: If there is no such function, or it does not return `(fn, args)`.
    """
    where, colon, attribute = name.rpartition(":")
    if not (colon and where and attribute):
        raise UsageError(
            f"TARGET must be module:function or file.py:function, got {name!r}. Write for instance "
            "net:setup."
        )
    module = _recorded(_module, failures)(where)
    setup = getattr(module, attribute, None)
    if not callable(setup):
        known = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        raise UsageError(
            f"TARGET must name a function, got {attribute!r}, which {where} has "
            f"not{close_to(attribute, known)}. It has {listed(sorted(known))}."
        )
    returned = _recorded(setup, failures)(*first, **dict(map(_setting, settings)))
    if not (
        isinstance(returned, tuple)
        and len(returned) == 2
        and callable(returned[0])
        and isinstance(returned[1], tuple | list)
    ):
        raise UsageError(
            f"TARGET must return (fn, args), a function and the tuple of its arguments, got "
            f"{_described(returned)} from {name}. For one argument write `return fn, (x,)`."
        )
    fn, args = returned
    return Target(_recorded(fn, failures), tuple(args))


def _recorded(fn: Callable[..., Any], failures: list[BaseException]) -> Callable[..., Any]:
    """Return the function, which adds to `failures` what it raises."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            failures.append(error)
            raise

    call.__name__ = name_of(fn)
    if not hasattr(fn, "__wrapped__"):
        # It is no transform of another function, as that of jax.grad is.
        with contextlib.suppress(TypeError, ValueError):
            call.__signature__ = inspect.signature(fn)  # type: ignore[attr-defined]
            vars(call).pop("__wrapped__")
    for name in ("trace", "lower"):  # of a function under jax.jit, which may donate arguments
        if callable(method := getattr(fn, name, None)):
            setattr(call, name, _recorded(method, failures))
    return call


def _described(given: Any) -> str:
    """Return the types of what TARGET returned: `int`, `(function, Array)`."""
    if not isinstance(given, tuple):
        return type(given).__name__
    return f"({', '.join(type(each).__name__ for each in given)})"


def _module(where: str) -> ModuleType:
    """Import a module by its name or by the path of its file."""
    return _from_file(where) if pathlib.Path(where).suffix == ".py" else _by_name(where)


def _by_name(where: str) -> ModuleType:
    _importable(pathlib.Path.cwd())
    missing = UsageError(
        f"TARGET must name a module that can be imported, got {where!r}, which is neither in "
        f"{pathlib.Path.cwd()} nor installed. Change to its folder, or give the path of a .py file."
    )
    if where.startswith("."):
        raise missing
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        # Not if it is a module that the user's own module imports.
        if error.name is None or not f"{where}.".startswith(f"{error.name}."):
            raise
        raise missing from None


def _from_file(where: str) -> ModuleType:
    path = pathlib.Path(where).resolve()
    if not path.is_file():
        raise UsageError(
            f"TARGET must name a file that exists, got {where!r}, which is not in "
            f"{pathlib.Path.cwd()}. Give the path from there."
        )
    _importable(path.parent)
    # A unique name: a file random.py must not replace Python's `random` for later imports.
    name = f"_jrc_target_{path.stem}_{zlib.crc32(os.fsencode(path)):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"TARGET must name a Python file, got {where!r}.")
    module = importlib.util.module_from_spec(spec)
    # dataclasses and pickle look a class's module up there.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _importable(folder: pathlib.Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not (equals and key.isidentifier()):
        raise UsageError(f"--arg must be KEY=VALUE, such as layers=12, got {text!r}.")
    try:
        return key, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        if re.fullmatch(r"[A-Za-z_][\w.-]*", value):
            return key, value
        raise UsageError(
            f"--arg {key}= must be a Python literal or a word, got {value!r}. Quote text in the "
            "shell: --arg 'text=\"two words\"'."
        ) from None
