"""Checks of `jrc`'s annotations while tests run: shapes and dtypes by jaxtyping, types by beartype.

`install()` must run before the first import of `jrc`. Each function of a module and each method of
its classes checks its arguments and its result, in its first calls: in each file of tests again.
Solvers call small functions thousands of times: checks of all calls took half of the time of a
plan. `JRC_NO_TYPE_CHECKS=1` leaves them out.

A function that is defined inside of another is left as it is: its code and its place are part of
what `jrc` traces, and it would be wrapped again at each call of the outer one.
"""

import dataclasses
import functools
import inspect
import os
import random
from unittest import mock

import jaxtyping
from jax.extend.source_info_util import register_exclusion

# Of a list beartype checks one entry, drawn at random. It draws from a generator of its own: what
# a test or hypothesis draws must not depend on the checks.
with mock.patch("random.getrandbits", random.Random(0).getrandbits):
    from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
"""Wraps a function; an `int` passes for a `float`, as type checkers allow."""

CHECKED_CALLS = 3
_called = []
"""For each function that was called, in a list: how many of its calls are still to be checked."""


def install():
    """Have every module of `jrc` that is imported from here on check its annotations."""
    if os.environ.get("JRC_NO_TYPE_CHECKS"):
        return
    # A wrapper is a frame around the user's code: source lines must not name it.
    register_exclusion(os.path.dirname(jaxtyping.__file__) + os.sep)
    register_exclusion(__file__)
    jaxtyping.jaxtyped = _outer_functions(jaxtyping.jaxtyped)
    jaxtyping.install_import_hook("jrc", f"{__name__}.check")


def switch(on):
    """Turn the checks on or off."""
    jaxtyping.config.update("jaxtyping_disable", not on)


def begin_again():
    """Let the next calls of each function count as its first ones."""
    for left in _called:
        left[0] = CHECKED_CALLS
    _called.clear()


def _outer_functions(jaxtyped):
    """Return jaxtyping's decorator for all but functions inside of functions.

    The import hook decorates each `def` that it sees, and calls `jaxtyping.jaxtyped` by name.
    """

    @functools.wraps(jaxtyped)
    def decorator(*args, **kwargs):
        decorate = jaxtyped(*args, **kwargs)
        if args:
            return decorate
        return lambda function: (
            function if _is_inner(function) else _in_first_calls(function, decorate)
        )

    return decorator


def _in_first_calls(function, decorate):
    """Return a function that checks its first calls; a dataclass checks how it is made."""
    if isinstance(function, classmethod | staticmethod):
        return type(function)(_in_first_calls(function.__func__, decorate))
    if inspect.isclass(function):
        if dataclasses.is_dataclass(function) and "__init__" in vars(function):
            function.__init__ = _in_first_calls(function.__init__, decorate)
        return function
    if not inspect.isfunction(function):
        return decorate(function)
    left, checked = [CHECKED_CALLS], []

    @functools.wraps(function)
    def call(*args, **kwargs):
        __tracebackhide__ = True
        if not left[0]:
            return function(*args, **kwargs)
        if left[0] == CHECKED_CALLS:
            _called.append(left)
        left[0] -= 1
        if not checked:  # most functions are called by few tests, and some by none
            checked.append(decorate(function))
        return checked[0](*args, **kwargs)

    return call


def _is_inner(function):
    """Whether a function or a method was defined inside of a function."""
    if isinstance(function, property):
        function = function.fget
    return "<locals>" in getattr(inspect.unwrap(function), "__qualname__", "")
