"""The program that a plan is made for, and applied to."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jrc._errors import name_of
from jrc._jaxpr import (
    Opened,
    Traced,
    evaluate,
    inlined_program,
    open_regions,
    trace,
    with_constants_outside,
)
from jrc._tree import is_traced, named_leaves
from jrc.remat._gradient.arguments import call_checked
from jrc.remat._gradient.numbers import settled
from jrc.remat._gradient.variable_changes import refuse_shared, with_changes
from jrc.remat._policy.checkpoint_names import is_own_name

_KIND = inspect.Parameter


@dataclasses.dataclass(frozen=True, eq=False)
class TracedForPlan(Traced):
    """A function's program as a plan sees it.

    Attributes:
        written: The program as the user wrote it, with its `jax.checkpoint` regions; arrays that
            functions inside of loops and regions close over are operands of these.
        opened: What was opened of them.
        names: The path of each array among the arguments: `params/w`.
    """

    written: Any
    opened: Opened
    names: tuple[str, ...]

    @property
    def regions(self) -> int:
        """How many regions are opened."""
        return self.opened.count

    def plain(self, *inputs: Any) -> list[Any]:
        """Run the program without the regions."""
        return evaluate(self.opened.jaxpr)(*inputs)


def traced_for_plan(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    respect_checkpoints: bool = False,
) -> TracedForPlan:
    """Return a function's program without `jit` calls; numbers are inputs where they may be.

    Its results are those of the function, and what the function changes in its arguments.

    Args:
        fn: The function.
        args: Its arguments by position.
        kwargs: Its arguments by name.
        respect_checkpoints: Whether `jax.checkpoint` regions stay as they are.

    Raises:
        ValueError: If the function changes a flax nnx variable that two modules share.
    """
    # Rebuilt arguments have as many copies of a variable as there are modules that share it.
    given = args, kwargs
    args, kwargs = settled(fn, args, kwargs, lambda path, leaf: True)
    names = _names_of_arrays(fn, args, kwargs)
    changing = with_changes(lambda *args, **kwargs: call_checked(fn, args, kwargs), name_of(fn))
    changed: list[int] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        out, changes = changing(*args, **kwargs)
        changed[:] = changes
        return out, changes

    # With `jax.disable_jit`, JAX unrolls loops: another program.
    with jax.disable_jit(False):
        traced = trace(run, args, kwargs, lambda _: True)
    refuse_shared(given, changed, name_of(fn))
    written = with_constants_outside(traced.program.jaxpr)
    # What a region of this package saves under a name of its own is the planner's to decide too.
    opened = Opened(written, 0) if respect_checkpoints else open_regions(written, is_own_name)
    program = inlined_program(opened.jaxpr)
    return TracedForPlan(
        program, traced.inputs, traced.result, traced.closed, written, opened, names
    )


def _names_of_arrays(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the path of each array among a call's arguments, from the parameter's name on."""
    given = [*zip(_parameters(fn, len(args)), args, strict=True), *kwargs.items()]
    return tuple(
        "/".join(filter(None, (name, path)))
        for name, value in given
        for path, leaf in named_leaves(value)
        if is_traced(leaf)
    )


def _parameters(fn: Callable[..., Any], count: int) -> list[str]:
    """Return the names of a function's first parameters, numbers where there are none."""
    try:
        found = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        found = []
    names = []
    for i in range(count):
        if i < len(found) and found[i].kind in (_KIND.POSITIONAL_ONLY, _KIND.POSITIONAL_OR_KEYWORD):
            names.append(found[i].name)
        else:
            names.append(f"argument {i}")
    return names
