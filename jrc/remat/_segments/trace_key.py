"""The key of a cached trace: all that a function captures, or `None` where that cannot be known.

A function is cached only if it captures nothing but arrays, plain values, containers and frozen
records of them, modules, and functions that capture no more than that. A function that captures a
class or any other object, imports inside of its body, or has attributes of its own is traced at
every call, because a change of these would not be seen.

>>> options = {"scale": 2}
>>> scaled = functools.partial(lambda options, x: options["scale"] * x, options)
>>> before = trace_key(scaled)
>>> before == trace_key(scaled)
True
>>> options["scale"] = 3
>>> before == trace_key(scaled)
False
>>> class Settings:
...     scale = 2
>>> print(trace_key(Settings()))
None
"""

import dataclasses
import dis
import enum
import functools
import types
import weakref
from collections.abc import Hashable, Iterator
from typing import Any

import jax
import numpy as np

_MOST = 1000
"""The largest number of captured values: a function with more is not cached."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), slice, range)
# What functions and classes of these modules read is taken as constant.
_LIBRARIES = ("jax", "jaxlib", "jrc", "numpy", "builtins", "math", "functools", "operator",
              "itertools", "typing", "collections")  # fmt: skip


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


class _Uncacheable(Exception):
    """The value may change without notice."""


def trace_key(*values: Any) -> Hashable | None:
    """Return a key that changes with anything that functions or other values capture.

    Args:
        *values: Functions, partial functions, or static arguments.

    Returns:
        The key, or `None` where a change might not be seen.
    """
    walk = _Walk()
    try:
        return tuple(map(walk.token, values))
    except _Uncacheable:
        return None


def has_cache(function: Any) -> bool:
    """Return whether traces of a function may be cached: it is a plain or a partial function."""
    return type(function) in (types.FunctionType, functools.partial)


class _Walk:
    """One walk over captured values. `seen` ends cycles, and keeps values alive: ids are unique."""

    def __init__(self):
        self.seen: dict[int, Any] = {}
        self.left = _MOST

    def token(self, value: Any) -> Hashable:
        self.left -= 1
        if self.left < 0:
            raise _Uncacheable
        kind = type(value)
        if kind in _PLAIN or (isinstance(value, np.generic) and kind.__module__ == "numpy"):
            return kind, repr(value)
        if isinstance(value, jax.Array | enum.Enum | np.dtype | types.BuiltinFunctionType):
            return _Identity(value)
        if id(value) in self.seen:
            return _Identity(value)
        self.seen[id(value)] = value
        if kind in (tuple, list):
            return kind, *map(self.token, value)
        if kind is dict:
            return dict, *((self.token(key), self.token(x)) for key, x in value.items())
        if kind in (set, frozenset):
            return kind, frozenset(map(self.token, value))
        return _Identity(value), *self.contents(value)

    def contents(self, value: Any) -> Iterator[Hashable]:
        """The tokens of what a function or a record captures."""
        if isinstance(value, types.FunctionType):
            yield from () if _is_library(value.__module__) else self.captured_by(value)
        elif isinstance(value, functools.partial):
            yield from map(self.token, (value.func, value.args, value.keywords))
        elif isinstance(value, type | types.ModuleType):
            # Of a user's module only what a function reads counts: see `of_names`.
            is_module = isinstance(value, types.ModuleType)
            if not is_module and not _is_library(value.__module__):
                raise _Uncacheable
        elif type(value).__module__.partition(".")[0] in ("jax", "jaxlib"):
            # An object of JAX's own, such as a jitted function: its functions are the user's.
            inner = (getattr(value, name, None) for name in ("__wrapped__", "fun", "fwd", "bwd"))
            yield from (self.token(each) for each in inner if each is not None)
        elif _is_record(value):
            yield _Identity(type(value))
            yield from map(self.token, _fields(value))
        else:
            raise _Uncacheable

    def captured_by(self, function: types.FunctionType) -> Iterator[Hashable]:
        if function.__dict__.keys() - {"__wrapped__"} or _imports(function.__code__):
            raise _Uncacheable
        yield _Identity(function.__code__)
        yield self.token(function.__defaults__)
        yield self.token(function.__kwdefaults__)
        yield self.token(function.__dict__.get("__wrapped__"))
        for cell in function.__closure__ or ():
            try:
                yield self.token(cell.cell_contents)
            except ValueError:  # not assigned yet
                yield None
        names = set(_names_in(function.__code__))
        yield from self.of_names(names, function.__globals__)

    def of_names(self, names: set[str], space: dict[str, Any]) -> Iterator[Hashable]:
        """The tokens of those variables of a module that have one of these names."""
        for name in sorted(names & space.keys()):
            value = space[name]
            yield name, self.token(value)
            if isinstance(value, types.ModuleType) and not _is_library(value.__name__):
                self.left -= 1
                if self.left < 0:
                    raise _Uncacheable
                yield from self.of_names(names - {name}, vars(value))


def _is_record(value: Any) -> bool:
    """Whether this is a named tuple or a frozen dataclass."""
    if isinstance(value, tuple):
        return hasattr(value, "_fields")
    return dataclasses.is_dataclass(value) and type(value).__dataclass_params__.frozen


def _fields(value: Any) -> Iterator[Any]:
    """The fields of a record, and the plain attributes of its class."""
    if isinstance(value, tuple):
        yield from value
    else:
        yield from (getattr(value, each.name) for each in dataclasses.fields(value))
    for kind in type(value).__mro__:
        yield {name: x for name, x in vars(kind).items() if type(x) in _PLAIN}


def _imports(code: types.CodeType) -> bool:
    """Whether a function, or one inside of it, imports a module when it runs."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    here = any(each.opname == "IMPORT_NAME" for each in dis.get_instructions(code))
    return here or any(map(_imports, inner))


def _names_in(code: types.CodeType) -> Iterator[str]:
    """The global names and attributes that a function and those inside of it read."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _names_in(const)


def _is_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES
