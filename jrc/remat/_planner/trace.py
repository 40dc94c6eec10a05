"""The program that a plan is made for, and applied to."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jrc._errors import name_of
from jrc._jaxpr import Program, Traced, folded, inline_marked, trace
from jrc.remat._gradient.arguments import call_checked
from jrc.remat._gradient.numbers import settled
from jrc.remat._gradient.variable_changes import with_changes
from jrc.remat._planner.unshare import unshared


def traced_for_plan(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], who: str
) -> Traced:
    """Return a function's program without `jit` calls; numbers are inputs where they may be.

    Its results are those of the function, and what the function changes in its arguments.
    """
    args, kwargs = settled(fn, args, kwargs, lambda path, leaf: True, who)
    run = with_changes(
        lambda *args, **kwargs: call_checked(fn, args, kwargs, who), name_of(fn), who
    )
    # With `jax.disable_jit`, JAX unrolls loops: another program.
    with jax.disable_jit(False):
        traced = trace(run, args, kwargs, lambda _: True)
    return dataclasses.replace(traced, program=inlined_program(traced.program.jaxpr))


def inlined_program(jaxpr: Any) -> Program:
    """Return a program without `jit` calls, and with copies of cheap values that are shared.

    Numbers have the type that they are cast to.
    """
    return unshared(Program(folded(inline_marked(jaxpr, lambda _: True))))
