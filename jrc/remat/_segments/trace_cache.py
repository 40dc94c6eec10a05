"""Tracing a function once for many calls, as `jax.checkpoint` does.

JAX caches the trace of a `jax.jit` function by its argument types and its own configuration. Here
a function is traced through one such `jit` for each key of what it captures (`trace_key`). A trace
is cached as long as the function lives. A function that captures objects, a method, and one that
changes what it captures are traced at every call.

>>> import jax.numpy as jnp
>>> def block(x):
...     print("traced")
...     return jnp.sin(x)
>>> for _ in range(2):
...     traced, prepared = trace_cached(block, (jnp.ones(2),), {}, lambda _: False, id)
traced
"""

import dataclasses
import weakref
from collections.abc import Callable, Hashable, Mapping
from contextvars import ContextVar
from typing import Any

import jax

from jrc._errors import name_of
from jrc._jaxpr import Program, Traced, inline_marked, inner_program, inner_programs, trace
from jrc._tree import Skeleton, split
from jrc.remat._segments.trace_key import has_cache, trace_key

_MOST = 32
"""The largest number of keys that are cached for one function."""

_FUNCTION: ContextVar[Callable[..., Any]] = ContextVar("function")
"""The function that is being traced: a cached entry must not keep it alive."""


@dataclasses.dataclass(frozen=True)
class _Entry[T]:
    """A traced function for one key.

    Attributes:
        jitted: The function of arrays, whose traces JAX caches.
        results: The structures of the results of traces, the newest last.
        programs: By JAX's own program, what was made of it.
    """

    jitted: Callable[..., Any]
    results: list[Skeleton]
    programs: weakref.WeakKeyDictionary[Any, tuple[Program, Skeleton, T]]


_ENTRIES: weakref.WeakKeyDictionary[Any, dict[Hashable, _Entry]] = weakref.WeakKeyDictionary()


def trace_cached[T](
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    and_where: Callable[[Any], bool],
    prepare: Callable[[Program], T],
) -> tuple[Traced, T]:
    """Return `trace(fn, args, kwargs, and_where)` and what `prepare` makes of its program.

    Args:
        fn: The function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        and_where: Which nested `jit` calls are written inline; the same in all calls.
        prepare: Makes something of the program; the same in all calls.
    """
    leaves, skeleton = split((args, tuple(kwargs.items())))
    key = _key(fn, skeleton)
    entries = None if key is None or jax.config.jax_disable_jit else _entries_of(fn)
    if entries is None:
        return _uncached(fn, args, kwargs, and_where, prepare)
    entry = entries.get(key) or _new_entry(skeleton, name_of(fn))
    outer = _traced(fn, entry, leaves)
    if entry.results and _key(fn, skeleton) == key:
        # Else the function has changed what it captures, such as a counter of its calls.
        entries[key] = entry
    body = _only_call(outer)
    if body is not None and entry.results:
        program = _inlined(outer, body, and_where)
        entry.programs[body] = program, entry.results.pop(), prepare(program)
    entry.results.clear()
    if body is None or body not in entry.programs:
        return _uncached(fn, args, kwargs, and_where, prepare)
    program, result, prepared = entry.programs[body]
    consts = tuple(outer.consts)
    return Traced(program, (*consts, *leaves), result, len(consts)), prepared


def _uncached[T](
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    and_where: Callable[[Any], bool],
    prepare: Callable[[Program], T],
) -> tuple[Traced, T]:
    traced = trace(fn, args, kwargs, and_where)
    return traced, prepare(traced.program)


def _key(fn: Callable[..., Any], skeleton: Skeleton) -> Hashable | None:
    """What must be equal in two calls that share a trace, besides the types of the arrays."""
    captured = trace_key(fn, skeleton.static)
    return None if captured is None else (skeleton.treedef, captured)


def _entries_of(fn: Any) -> dict[Hashable, _Entry] | None:
    """The entries of a function, `None` if it can have none."""
    if not has_cache(fn):
        return None
    try:
        entries = _ENTRIES.setdefault(fn, {})
    except TypeError:  # it takes no weak reference
        return None
    if len(entries) > _MOST:
        entries.clear()
    return entries


def _new_entry(skeleton: Skeleton, name: str) -> _Entry:
    results: list[Skeleton] = []

    def flat(*arrays: Any) -> list[Any]:
        new_args, new_kwargs = skeleton.fill(arrays)
        out, result = split(_FUNCTION.get()(*new_args, **dict(new_kwargs)))
        results.append(result)
        return out

    flat.__name__ = name
    return _Entry(jax.jit(flat), results, weakref.WeakKeyDictionary())


def _traced(fn: Callable[..., Any], entry: _Entry, leaves: list[Any]) -> Any:
    token = _FUNCTION.set(fn)
    try:
        return jax.make_jaxpr(entry.jitted)(*leaves)
    finally:
        _FUNCTION.reset(token)


def _only_call(outer: Any) -> Any | None:
    """The program inside, if the whole program is one `jit` call."""
    is_call = len(outer.eqns) == 1 and outer.eqns[0].primitive.name == "jit"
    return inner_program(outer.eqns[0]) if is_call else None


def _inlined(outer: Any, body: Any, and_where: Callable[[Any], bool]) -> Program:
    jaxpr = outer.replace(constvars=[], invars=[*outer.constvars, *outer.invars])
    opens = lambda eqn: body in inner_programs(eqn) or and_where(eqn)  # noqa: E731
    return Program(inline_marked(jaxpr, opens))
