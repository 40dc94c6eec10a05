"""Running a cut program: each segment in a `jax.checkpoint`, the rest as it is."""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jrc._jaxpr import Program, evaluate, trace
from jrc.remat._cut import HELD, Cut, Cuts, check_request, cut_program
from jrc.remat._kept import notices

_logger = logging.getLogger("jrc")


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
    gradients and random draws are those of `fn`. What may surprise (a value that is kept although
    it is no boundary, a boundary that cuts nothing) is logged once, at level INFO to `jrc`.

    Args:
        fn: Any pure JAX-traceable function of pytrees; what it changes in place (an nnx module, a
            dict) is lost: split a module, and return its state. Leaves that are no JAX arrays
            (Python numbers, strings, NumPy) reach it as they are; what it closes over gets
            gradients too. Marks inside nested `jax.jit` calls count as if written inline.
        checkpoints: Names of the boundaries, as given to `jrc.mark`. A bare name that is used
            several times means all of them.
        rule: How boundaries become segments; see `jrc.find_segments`.
        no_recompute_segments: Numbers of segments, from 0, that are kept as they are.

    Returns:
        The same function. Works under `jit`, `grad`, `vmap`, `scan`, `shard_map` and inside itself.

    Raises:
        TypeError: If `fn` is no function, or `checkpoints` is a string or holds anything else
            than strings.
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
    check_request(fn, checkpoints, rule, who)
    names = tuple(checkpoints)
    skipped = tuple(no_recompute_segments)
    said: set[str] = set()

    @functools.wraps(fn)
    def segmented(*args: Any, **kwargs: Any) -> Any:
        traced = trace(fn, args, kwargs)
        cuts = cut_program(
            traced.program, names, rule, who=who, fn=fn, no_recompute_segments=skipped
        )
        for notice in notices(traced.program, cuts):
            if notice not in said:
                said.add(notice)
                _logger.info("%s: %s", who, notice)
        return traced.run(lambda *inputs: run_cuts(traced.program, cuts, inputs))

    return segmented  # type: ignore[return-value]


def run_cuts(program: Program, cuts: Cuts, inputs: Sequence[Any]) -> list[Any]:
    """Run a cut program on its inputs; the results are the program's own."""
    values: dict[Any, Any] = dict(zip(program.jaxpr.invars, inputs, strict=True))
    for cut in cuts.cuts:
        body = program.cut(cut.body)
        results = _segment(program, cut)(*(values[var] for var in body.invars))
        values |= dict(zip(body.outvars, results, strict=True))
        tail = program.cut(cut.tail)
        results = evaluate(tail)(*(values[var] for var in tail.invars))
        values |= dict(zip(tail.outvars, results, strict=True))
    return program.results(values)


def _segment(program: Program, cut: Cut) -> Callable[..., Sequence[Any]]:
    """The body as it runs in the forward pass: a `jax.checkpoint` if it is to be re-run."""
    if not cut.recompute or not cut.body:
        return evaluate(program.cut(cut.body))
    if not cut.held:
        return jax.checkpoint(evaluate(program.cut(cut.body)))
    policy = jax.checkpoint_policies.save_only_these_names(HELD)
    return jax.checkpoint(_holding(program, cut), policy=policy)


def _holding(program: Program, cut: Cut) -> Callable[..., Sequence[Any]]:
    """The body as a function that names every held value where it is made."""
    whole = program.cut(cut.body)
    makers = sorted({program.producer[var] for var in cut.held})
    parts = [
        program.cut([p for p in cut.body if start < p <= end])
        for start, end in zip([-1, *makers], [*makers, len(program.eqns)], strict=True)
    ]

    def run(*inputs: Any) -> list[Any]:
        values: dict[Any, Any] = dict(zip(whole.invars, inputs, strict=True))
        for part in parts:
            results = evaluate(part)(*(values[var] for var in part.invars))
            values |= {
                var: checkpoint_name(x, HELD) if var in cut.held else x
                for var, x in zip(part.outvars, results, strict=True)
            }
        return [values[var] for var in whole.outvars]

    return run
