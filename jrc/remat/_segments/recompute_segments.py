"""Running a cut program: each segment in a `jax.checkpoint`, the rest as it is."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jrc._jaxpr import Program, Reads, View, evaluate, facts_of, mark_of, trace
from jrc.remat._policy.notices import emit_notice
from jrc.remat._policy.resolution import SAVED, Policy
from jrc.remat._policy.rules import Rule
from jrc.remat._region.interpreter import EquationRange, Region, recomputed_region
from jrc.remat._segments.cut import Section, SectionedProgram, cut_program
from jrc.remat._segments.cut_notices import cuts_without_effect, notices
from jrc.remat._segments.request import checked_request

_logger = logging.getLogger("jrc")


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
        keep: Rules for what stays inside of segments, such as `jrc.SavePrimitives("dot_general")`;
            `jrc.RecomputePrimitives("tanh")` alone re-runs those operators only.
        keep_patterns: Runs of operators that stay: `{"pre_ops": [...], "main_ops": [...],
            "suf_ops": [...], "num": n}` keeps the results of the main operators of the first n
            matches in each segment (-1: of all), counted without marks and broadcasts.
        no_recompute_segments: Numbers of segments, from 0, that are kept as they are.
        recompute_collectives: Whether `psum`, `all_gather` and the like are run again. What
            automatic sharding inserts is no equation of the program and follows XLA.

    Returns:
        The same function. Works under `jit`, `grad`, `vmap`, `scan`, `shard_map` and inside itself.

    Raises:
        TypeError: If `fn` is no function, or `checkpoints` is a string or holds anything else
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
    who = "jrc.recompute_segments"
    request = checked_request(
        who, fn, checkpoints, rule, keep, keep_patterns, no_recompute_segments,
        recompute_collectives,
    )  # fmt: skip
    said: set[str] = set()

    @functools.wraps(fn)
    def segmented(*args: Any, **kwargs: Any) -> Any:
        traced = trace(fn, args, kwargs, request.opens)
        cuts = cut_program(traced.program, request, who=who, fn=fn)
        for text in cuts_without_effect(cuts):
            emit_notice(f"{who}: {text}")
        for text in notices(traced.program, cuts):
            if text not in said:
                said.add(text)
                _logger.info("%s: %s", who, text)
        return traced.run(lambda *inputs: run_sections(traced.program, cuts, inputs))

    return segmented  # type: ignore[return-value]


def run_sections(
    program: Program,
    cuts: SectionedProgram,
    inputs: Sequence[Any],
    region: Region = recomputed_region,
) -> list[Any]:
    """Run a cut program on its inputs; the results are the program's own."""
    values: dict[Any, Any] = dict(zip(program.jaxpr.invars, inputs, strict=True))
    for cut in cuts.cuts:
        run_section(program, cut, cuts.policy, values, region)
    return program.results(values)


def run_section(
    program: Program,
    cut: Section,
    policy: Policy,
    values: dict[Any, Any],
    region: Region,
    own_inside: bool = False,
    **options: Any,
) -> None:
    """Run one stretch; `region` runs a segment that is to be re-run.

    With `own_inside` an operator that ends it, and whose held result serves its own derivative,
    runs inside. Outside, JAX may keep what it makes of the result beside it, as 1 - y² of a tanh.
    """
    outside = _trailing(program, cut, own_inside)
    positions = [p for p in cut.positions if p not in outside]
    outvars = program.crossing(positions)
    stretch = EquationRange(program, positions, outvars, policy, cut.held, **options)
    inputs = [values[var] for var in stretch.invars]
    results = (
        region(stretch.run_recomputed, inputs) if cut.recompute else stretch.run_saved(*inputs)
    )
    values |= dict(zip(stretch.outvars, results, strict=True))
    tail = program.cut(outside)
    results = evaluate(tail)(*(values[var] for var in tail.invars))
    values |= dict(zip(tail.outvars, results, strict=True))


def _trailing(program: Program, cut: Section, own_inside: bool) -> list[int]:
    """What ends a stretch and may run outside of it, because nothing else inside reads it.

    Marks, which another transform sees there; reshapes; and an operator whose held result serves
    its own derivative. Held inside, that result would be kept twice with `jax_remat3`.
    """
    inside, found = set(cut.positions), []
    for p in reversed(cut.positions):
        eqn = program.eqns[p]
        readers = {c for var in eqn.outvars for c in program.consumers.get(var, ())}
        shows = mark_of(eqn) is not None or facts_of(eqn).view is View.RESHAPE
        own = (
            facts_of(eqn).derivative_reads == Reads.RESULT and cut.held.get(eqn.outvars[0]) == SAVED
        )
        own = own and not own_inside
        if (shows or own) and readers and not readers & inside:
            found.append(p)
            inside.discard(p)
    return found[::-1]
