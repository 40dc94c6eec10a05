"""A fingerprint of what a function captures, for a cache that must not return stale constants.

>>> options = {"scale": 2}
>>> scaled = functools.partial(lambda options, x: options["scale"] * x, options)
>>> before = fingerprint(scaled)
>>> before == fingerprint(scaled)
True
>>> options["scale"] = 3
>>> before == fingerprint(scaled)
False
"""

import enum
import functools
import os
import sys
import sysconfig
import types
import weakref
from collections.abc import Hashable, Iterator
from typing import Any

import jax
import numpy as np

_MOST = 1000
"""The largest number of captured values: a function with more is not cached."""

_PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None), type(Ellipsis))
_LIBRARIES = {"jax", "jaxlib", "jrc", "flax", "numpy", "optax"}
_STANDARD_LIBRARY = os.path.realpath(sysconfig.get_paths()["stdlib"]) + os.sep
_FIXED = (type, types.ModuleType, types.BuiltinFunctionType, enum.Enum, np.dtype)


class _Identity:
    """Equal to another one of the same object, as long as the object lives; keeps nothing alive."""

    def __init__(self, value: Any):
        self.hash = id(value)
        try:
            self.value = weakref.ref(value)
        except TypeError:
            self.value = lambda: value

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        value = self.value()
        return isinstance(other, _Identity) and value is not None and value is other.value()


class _Walk:
    """One walk over captured values; `seen` ends cycles and keeps values alive, so ids unique."""

    def __init__(self):
        self.seen: dict[int, Any] = {}
        self.left = _MOST

    def token(self, value: Any) -> Hashable:
        self.left -= 1
        if self.left < 0:
            raise _Uncacheable
        if isinstance(value, _PLAIN):
            return type(value), repr(value)
        if isinstance(value, (jax.Array, *_FIXED)) or _is_of_jax(value) or id(value) in self.seen:
            return _Identity(value)
        self.seen[id(value)] = value
        if isinstance(value, tuple | list):
            return type(value), *map(self.token, value)
        if isinstance(value, dict):
            return dict, *((self.token(key), self.token(x)) for key, x in value.items())
        if isinstance(value, set | frozenset):
            return set, frozenset(map(self.token, value))
        return _Identity(value), *map(self.token, _contents(value))


class _Uncacheable(Exception):
    """The value may change without notice."""


def fingerprint(*values: Any) -> Hashable | None:
    """Return a key that changes with anything that functions or other values capture.

    Arrays count by identity, numbers and text by value, containers and objects by what they
    contain; functions of libraries, modules and classes by identity.

    Args:
        *values: Functions, methods, partial functions, or static arguments.

    Returns:
        The key, or `None` where a change would not be seen: NumPy arrays, objects with slots (so
        the variables of flax nnx), more than 1000 values.
    """
    walk = _Walk()
    try:
        return tuple(map(walk.token, values))
    except _Uncacheable:
        return None


def owner_of(function: Any) -> Any | None:
    """Return the object whose end is the end of a cached trace, `None` where there is no cache."""
    if isinstance(function, functools.partial):
        return function
    if isinstance(function, types.MethodType):
        return function.__self__
    return function if isinstance(function, types.FunctionType) else None


def _contents(value: Any) -> Iterator[Any]:
    """What an object captures."""
    if isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType):
        if not _is_library(value.__module__):
            yield from _captured_by(value)
    elif hasattr(value, "__dict__"):
        yield vars(value)
    else:  # a NumPy array, an object with slots: it may change in place
        raise _Uncacheable


def _captured_by(function: types.FunctionType) -> Iterator[Any]:
    yield from (function.__defaults__, function.__kwdefaults__)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            yield None
    names = set(_names_in(function.__code__))
    for name in sorted(names & function.__globals__.keys()):
        value = function.__globals__[name]
        yield value
        if isinstance(value, types.ModuleType) and not _is_library(value.__name__):
            yield [vars(value)[each] for each in sorted(names & vars(value).keys())]


def _names_in(code: types.CodeType) -> Iterator[str]:
    """The global names and attributes that a function and those inside of it read."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _names_in(const)


def _is_of_jax(value: Any) -> bool:
    """Whether this is an object of JAX's own, such as a jitted function or a tree structure."""
    return type(value).__module__.partition(".")[0] in ("jax", "jaxlib")


@functools.cache
def _is_library(module: str | None) -> bool:
    """Whether a module is no code of the user's, whose captured values are taken as constant."""
    name = (module or "").partition(".")[0]
    if name in _LIBRARIES or name in sys.builtin_module_names:
        return True
    # By place and not by name: a file `code.py` of the user's hides the module `code`.
    path = os.path.realpath(getattr(sys.modules.get(name), "__file__", None) or "")
    return path.startswith(_STANDARD_LIBRARY) and "site-packages" not in path
