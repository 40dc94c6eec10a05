"""Running a cut program: each segment in a `jax.checkpoint`, the rest as it is."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jrc._jaxpr import Program, evaluate, trace
from jrc.remat._cut import Cuts, check_request, cut_program


def recompute_segments[F: Callable[..., Any]](
    fn: F,
    checkpoints: Sequence[str],
    *,
    rule: str = "partition",
    no_recompute_segments: Sequence[int] = (),
) -> F:
    """Re-run a function's intermediates in the backward pass instead of keeping them.

    The function is cut at named boundaries. Kept are its inputs, the boundaries, and whatever
    else crosses from one segment into another; every segment is run again when the backward pass
    reaches it, the last one first. What lies after the last boundary is never re-run. Values,
    gradients and random draws are those of `fn`.

    Args:
        fn: Any JAX-traceable function of pytrees. Leaves that are no JAX arrays (Python numbers,
            strings, NumPy) reach it as they are; what the function closes over gets gradients too.
            Marks inside nested `jax.jit` calls count as if written inline.
        checkpoints: Names of the boundaries, as given to `jrc.mark`. A bare name that is used
            several times means all of them.
        rule: How boundaries become segments; see `jrc.find_segments`.
        no_recompute_segments: Numbers of segments, from 0, that are kept as they are.

    Returns:
        The same function. Works under `jit`, `grad`, `vmap`, `scan`, `shard_map` and inside itself.

    Raises:
        TypeError: If `checkpoints` is a string or holds anything else than strings.
        ValueError: When called, if a boundary is not marked or stands inside a loop or another
            construct, or a segment number does not exist; at once, if `rule` is unknown.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def loss(w, x):
        ...     for i in range(3):
        ...         x = jrc.mark(jnp.sin(x @ w), f"layer_{i}")
        ...     return jnp.sum(x)
        >>> lean = jrc.recompute_segments(loss, ["layer_0", "layer_1"])
        >>> w, x = jnp.ones((3, 3)), jnp.ones((2, 3))
        >>> bool(jnp.allclose(jax.grad(lean)(w, x), jax.grad(loss)(w, x)))
        True

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174, sec. 4;
    Paddle's `RecomputeOptimizer`.
    """
    who = "jrc.recompute_segments"
    check_request(checkpoints, rule, who)
    names = tuple(checkpoints)
    skipped = tuple(no_recompute_segments)

    @functools.wraps(fn)
    def segmented(*args: Any, **kwargs: Any) -> Any:
        traced = trace(fn, args, kwargs)
        cuts = cut_program(
            traced.program, names, rule, who=who, fn=fn, no_recompute_segments=skipped
        )
        return traced.run(lambda *inputs: run_cuts(traced.program, cuts, inputs))

    return segmented  # type: ignore[return-value]


def run_cuts(program: Program, cuts: Cuts, inputs: Sequence[Any]) -> list[Any]:
    """Run a cut program on its inputs; the results are the program's own."""
    values = dict(zip(program.jaxpr.invars, inputs, strict=True))
    for cut in cuts.cuts:
        _run(program, cut.body, values, jax.checkpoint if cut.recompute else _as_is)
        _run(program, cut.tail, values, _as_is)
    return program.results(values)


def _run(
    program: Program,
    positions: Sequence[int],
    values: dict[Any, Any],
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Run some equations inside `wrap`, from the values they read to those that cross out."""
    if positions:
        part = program.cut(positions)
        results = wrap(evaluate(part))(*(values[var] for var in part.invars))
        values |= dict(zip(part.outvars, results, strict=True))


def _as_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
