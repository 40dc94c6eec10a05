"""`jrc.recompute_segments`: the segments of a function between named boundaries, recomputed."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jrc._errors import named_like, public
from jrc._jaxpr import trace
from jrc.remat._policy.notices import emit_notice
from jrc.remat._policy.rules import Rule
from jrc.remat._segments.cut import cut_program
from jrc.remat._segments.cut_notices import notices, requests_without_effect
from jrc.remat._segments.request import checked_request
from jrc.remat._segments.run_sections import run_sections

_logger = logging.getLogger("jrc")


@public("jrc.recompute_segments")
def recompute_segments[F: Callable[..., Any]](
    fn: F,
    checkpoints: Sequence[str],
    *,
    rule: str = "partition",
    keep: Rule | None = None,
    keep_patterns: Sequence[Mapping[str, Any]] = (),
    no_recompute_segments: Sequence[int] = (),
    recompute_collectives: bool = False,
) -> F:
    """Recompute a function's intermediate values in the backward pass instead of saving them.

    The function is cut at named boundaries. Its inputs, the boundaries and all other values that
    cross from one segment into another are saved. The backward pass recomputes each segment when
    it reaches it, the last one first. What lies after the last boundary is not recomputed. Values,
    gradients and random draws are those of `fn`. An equation with an effect that `jax.checkpoint`
    refuses, such as a write to a `jax.Ref`, runs once, and what its derivative reads is saved.

    Each of the following is logged once to `jrc`: at level INFO values that cross although they
    are no boundaries, and boundaries that cut nothing; at level WARNING names that no mark
    carries, and patterns that match nothing.

    Args:
        fn: Any pure JAX-traceable function of pytrees. What it changes in place (an nnx module, a
            dict) is lost: split a module, and return its state. Leaves that are no JAX arrays
            (Python numbers, strings, NumPy arrays) reach it unchanged; arrays that it closes over
            get gradients too. Marks inside nested `jax.jit` calls count as if written inline.
        checkpoints: Names of the boundaries, as given to `jrc.mark`. A bare name that is used
            several times means all of them.
        rule: How boundaries become segments; see `jrc.find_segments`.
        keep: Rules for what is saved inside segments, such as
            `jrc.SavePrimitives("dot_general")`; `jrc.RecomputePrimitives("tanh")` alone recomputes
            those operators only.
        keep_patterns: Runs of operators that are saved: `{"pre_ops": [...], "main_ops": [...],
            "suf_ops": [...], "num": n}` saves the results of the main operators of the first n
            matches in each segment (-1: of all), counted without marks and broadcasts.
        no_recompute_segments: Numbers of segments, from 0, that are not recomputed.
        recompute_collectives: Whether `psum`, `all_gather` and the like are recomputed.
            Collectives that automatic sharding inserts are no equations of the program: XLA
            decides about them.

    Returns:
        The same function. It works under `jit`, `grad`, `vmap`, `scan`, `shard_map` and inside
        another transform of jrc.

    Raises:
        TypeError: If `fn` is no function, or `checkpoints` is a string or contains anything else
            than strings, or `keep` is no rule.
        ValueError: At once, if `rule` is unknown or a pattern wrong. When called, if a boundary
            is not marked or stands inside a loop or another construct, if a segment number does
            not exist, if `keep` names what is not there, or a memory that the device lacks.

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
    request = checked_request(
        fn, checkpoints, rule, keep, keep_patterns, no_recompute_segments,
        recompute_collectives,
    )  # fmt: skip
    logged: set[str] = set()

    @named_like(fn)
    def segmented(*args: Any, **kwargs: Any) -> Any:
        with public("jrc.recompute_segments"):
            traced = trace(fn, args, kwargs, request.opens)
            sections = cut_program(traced.program, request, fn)
            for notice in requests_without_effect(traced.program, sections, request):
                emit_notice(f"jrc.recompute_segments: {notice.text}")
            for notice in notices(traced.program, sections, request):
                if notice.text not in logged:
                    logged.add(notice.text)
                    _logger.log(notice.level, "jrc.recompute_segments: %s", notice.text)
            return traced.run(lambda *inputs: run_sections(traced.program, sections, inputs))

    return segmented  # type: ignore[return-value]
