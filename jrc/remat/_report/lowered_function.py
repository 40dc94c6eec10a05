"""A function as it is, lowered; or with arguments donated."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jrc._tree import split


def lowered_function(
    fn: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[jax.stages.Lowered, Any]:
    """Return a function lowered, and its program where that can be had.

    Args:
        fn: The function; one with a method `lower`, as `jax.jit` returns it, is lowered by that.
        args: Its arguments.
    """
    trace, lower = (getattr(fn, name, None) for name in ("trace", "lower"))
    if callable(trace) and callable(lower):
        traced = trace(*args)
        traced = getattr(traced, "traced", traced)  # what `nnx.jit` traces has JAX's inside
        return traced.lower(), traced.jaxpr
    if callable(lower):
        return lower(*args), None
    traced = _traced(fn, args)
    return traced.lower(), traced.jaxpr


def lowered_with_donation(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    donated: Sequence[int],
    lowered: jax.stages.Lowered,
    compiled: Any,
) -> jax.stages.Lowered:
    """Return a function lowered with arguments donated, and with the shardings that it has.

    Args:
        fn: The function.
        args: Its arguments; all arrays in them are arguments of its program.
        donated: The arguments whose arrays are donated, those that the function donates too.
        lowered: The function lowered without more donation.
        compiled: The same compiled; `None` where the compiler refuses it.
    """
    owners = [i for i, arg in enumerate(args) for _ in split(arg)[0]]
    options: dict[str, Any] = {}
    if compiled is not None:
        options["in_shardings"] = input_shardings(lowered, compiled)
        options["out_shardings"] = jax.tree.leaves(compiled.output_shardings)
    flat = [k for k, owner in enumerate(owners) if owner in donated]
    return _traced(fn, args, donate_argnums=flat, **options).lower()


def input_shardings(lowered: jax.stages.Lowered, compiled: Any) -> list[Any]:
    """Return the sharding of each argument; `None` for one that the program leaves out."""
    return jax.tree.structure(lowered.args_info).flatten_up_to(compiled.input_shardings)


def _traced(fn: Callable[..., Any], args: tuple[Any, ...], **options: Any) -> jax.stages.Traced:
    """Trace a function of the arrays in its arguments, to the list of the arrays it returns."""
    arrays, skeleton = split(args)

    def run(*given: Any) -> list[Any]:
        return split(fn(*skeleton.fill(given)))[0]

    return jax.jit(run, **options).trace(*arrays)
