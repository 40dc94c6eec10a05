"""`jrc.explain`: what a gradient saves, recomputes and needs, without running it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jrc._errors import public
from jrc._jaxpr import Program, flops, inline_marked, live_equations
from jrc._progress import shown_meanwhile
from jrc._targets import (
    Target,
    abstract_on,
    checked_target,
    target_device_context,
)
from jrc._validate import check_flag
from jrc.remat._compiled.collectives import collectives, mesh_of
from jrc.remat._compiled.hlo import Module, parse_hlo
from jrc.remat._gradient.arguments import refuse_tracers
from jrc.remat._gradient.compiled_memory import (
    Memory,
    bytes_on_device,
    memory_of,
    memory_of_refused,
)
from jrc.remat._gradient.loss import Loss, loss_of
from jrc.remat._gradient.opaque import Opaque, gathered, opaque_equations
from jrc.remat._gradient.recompute_count import reruns
from jrc.remat._gradient.saved_values import saved_values
from jrc.remat._policy.notices import collected_notices
from jrc.remat._report.compiled_schedule import live_points
from jrc.remat._report.diagnostics import warnings_of
from jrc.remat._report.explain_as_it_is import explained_as_it_is, refused_text, versions
from jrc.remat._report.report import Report
from jrc.remat._report.tried_remedies import with_tried_plans
from jrc.remat._time.seconds import device_with_rates, seconds_on


@public("jrc.explain")
def explain(
    fn: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] | None = 0,
    has_aux: bool = False,
    target: Target | str | None = None,
    try_remedies: bool = False,
) -> Report:
    """Report what the gradient of a function saves and recomputes, and what it needs compiled.

    With `argnums=None` it is the function as it is, such as a train step of your own under
    `jax.jit(step, donate_argnums=0)`, or a `jrc.TrainStep`.

    Nothing is run. Python calls `fn` once, to trace it; JAX traces the program that comes of it
    three more times (the gradient, the saved values, the compiled `jit(value_and_grad(fn))`). On a
    CPU whose rates are not known yet they are measured first, in some seconds, as for `jrc.plan`.

    Args:
        fn: Any differentiable function of pytrees that returns a scalar, as it is or under
            `jrc.recompute_segments`, `jax.checkpoint`, a plan.
        *args: Its arguments: arrays or `jax.ShapeDtypeStruct`s, in any pytree, flax nnx modules
            too. NumPy arrays count as arrays; Python numbers, strings and the like are passed as
            they are.
        argnums: Which arguments are differentiated: every floating leaf of them. `None` reports the
            function as it is, not its gradient; one under `jax.jit` keeps its donated arguments
            and shardings. Its results may be anything.
        has_aux: Whether `fn` returns a pair of the scalar and anything else.
        target: An accelerator that need not be there, as for `jrc.plan`.
        try_remedies: Whether what makes the peak smaller is compiled, not only named: plans that
            leave a half, a quarter and a tenth of the temporaries, and donated arguments. It takes
            as long as these plans, and `Report.remedies` then has their bytes and seconds. What
            raises is left out, and logged (logger `jrc`).

    Returns:
        The report, a frozen value that prints as a table.

    Raises:
        TypeError: If `fn` is no function, does not return a scalar, `argnums` is no position, or
            an array is traced, as for `jrc.plan`.
        ValueError: If there is no such argument, or it has no floating leaf; or `argnums=None` with
            `has_aux`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def loss(w, x):
        ...     for i in range(3):
        ...         x = jrc.mark(jnp.sin(x @ w), f"layer_{i}")
        ...     return jnp.sum(x)
        >>> w, x = jnp.ones((64, 64)), jnp.ones((32, 64))
        >>> report = jrc.explain(loss, w, x)
        >>> [(value.primitive, value.mark, value.bytes) for value in report.saved[:2]]
        [('sin', 'layer_0', 8192), ('cos', None, 8192)]
        >>> lean = jrc.explain(jrc.recompute_segments(loss, ["layer_0", "layer_1"]), w, x)
        >>> lean.saved_bytes < report.saved_bytes, [(r.primitive, r.count) for r in lean.rerun]
        (True, [('dot_general', 2)])

    Source: JAX's `jax.ad_checkpoint.print_saved_residuals`, and XLA's `memory_analysis`.
    """
    check_flag(has_aux, "has_aux")
    check_flag(try_remedies, "try_remedies")
    there = checked_target(target)
    if argnums is None and has_aux:
        raise ValueError(
            "argnums=None must be used with a function that is reported as it is, got "
            "has_aux=True, which is of gradients. Leave one of the two out."
        )
    with shown_meanwhile("jrc.explain: tracing and compiling"), target_device_context(there):
        if argnums is None:
            report = explained_as_it_is(fn, args, there, try_remedies)
        else:
            report = _explained(fn, args, argnums, has_aux, there)
    if try_remedies:
        report = with_tried_plans(report, fn, args, argnums, has_aux, there)
    return report


def _explained(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    argnums: int | Sequence[int],
    has_aux: bool,
    there: Target | None,
) -> Report:
    """Return the report of a function and checked options."""
    refuse_tracers(args)
    args = abstract_on(there, args) if there else args
    with collected_notices() as notices:
        loss = loss_of(fn, args, argnums, has_aux)
    forward = loss.program.jaxpr
    traced = loss.traced_gradient.jaxpr
    gradient = inline_marked(traced, lambda _: True)
    program = live_equations(gradient)
    memory, module, refused = _compiled(loss)
    device = device_with_rates(there, loss.device)
    return Report(
        name=loss.name,
        saved=saved_values(loss),
        rerun=reruns(forward, program),
        flops=flops(traced),
        memory=memory,
        live=live_points(module, loss) if module else (),
        collectives=collectives(module, mesh_of(loss)) if module else (),
        warnings=(*refused, *notices, *warnings_of(forward, gradient, program, loss.name)),
        opaque=_opaque(loss),
        device=there.name if there else loss.device.device_kind,
        time=seconds_on(module, device, memory.temporaries) if module and device else None,
        constants=sum(map(bytes_on_device, loss.constants)),
        versions=versions(),
        argnums=_positions(argnums, len(args)),
    )


def _positions(argnums: int | Sequence[int], count: int) -> tuple[int, ...]:
    chosen = argnums if isinstance(argnums, Sequence) else (argnums,)
    return tuple(int(n) % count for n in chosen)


def _compiled(loss: Loss) -> tuple[Memory, Module | None, tuple[str, ...]]:
    """Return the memory of the compiled gradient, its instructions, and what the compiler refused.

    A program that is too large for a TPU has no instructions: the compiler states its peak alone.
    """
    try:
        compiled = loss.compiled()
    except jax.errors.JaxRuntimeError as error:
        given = sum(map(bytes_on_device, (*loss.perturbed, *loss.rest)))
        memory = memory_of_refused(error, given)
        return memory, None, (refused_text(memory, "jrc.plan makes it fit"),)
    return memory_of(compiled), parse_hlo(compiled.as_text()), ()


def _opaque(loss: Loss) -> tuple[Opaque, ...]:
    """What the derivative saves of functions that nothing looks into."""
    program = Program(inline_marked(loss.program.jaxpr, lambda _: True))
    start = len(loss.constants)
    perturbed = program.jaxpr.invars[start : start + len(loss.perturbed)]
    found = opaque_equations(program, perturbed, program.jaxpr.outvars[:1], regions=False)
    return gathered(each for _, each in found)
