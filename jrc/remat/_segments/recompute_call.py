"""`jrc.recompute`: one call of a function as a segment, run once more in the backward pass."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from jrc._errors import name_of, public
from jrc._jaxpr import Program, evaluate
from jrc._rng import other_key
from jrc._tree import is_floating, is_typed_key
from jrc._validate import check_flag
from jrc.remat._policy.resolution import Policy
from jrc.remat._region.barrier import barrier
from jrc.remat._region.effects import must_run_once
from jrc.remat._region.perturbed import Perturbed, dense, primal_values
from jrc.remat._region.region import named_region, recomputed_region, should_inline
from jrc.remat._region.rerun_scope import rerun_scope
from jrc.remat._segments.cut import one_segment
from jrc.remat._segments.run_sections import run_sections
from jrc.remat._segments.trace_cache import trace_cached

Run = Callable[..., Sequence[Any]]


@public("jrc.recompute")
def recompute(
    function: Callable[..., Any],
    *args: Any,
    preserve_rng_state: bool = True,
    use_reentrant: bool = True,
    **kwargs: Any,
) -> Any:
    """Call a function as one segment: its inputs are saved, its intermediate values recomputed.

    Results of `jrc.keep_op` inside, and results of collectives, are saved and not recomputed. An
    equation with an effect that `jax.checkpoint` refuses, such as a write to a `jax.Ref`, runs
    once. A region inside a region is not nested: the outer one recomputes it, once, and saves what
    rules and tags inside save. To recompute in several levels use `jax.checkpoint` itself.

    Args:
        function: Any pure JAX-traceable function of pytrees. What it closes over gets gradients
            too. Its gradient needs one trace, so that a state which it threads (running
            statistics) is updated once. Later calls reuse the trace for equal argument types if
            the function captures nothing but arrays, plain values, containers of them, modules
            and such functions, and as long as these do not change; a method, and a function that
            captures an object or a class, is traced at every call. What it changes in place (an
            nnx module, a dict) is lost: return it.
        *args: Its arguments; leaves that are no JAX arrays reach it unchanged.
        preserve_rng_state: `True`: the recomputation draws the same random bits. `False`: typed
            keys among the arguments are folded with a constant in the recomputation, which then
            draws OTHER bits: the gradient is that of another mask than the forward pass used, a
            biased one. This is Paddle's meaning of `False`. It needs `use_reentrant=True`, and
            nothing inside is saved.
        use_reentrant: `True`: built on `jax.custom_vjp`, which has no forward mode (`jax.jvp`,
            `jax.jacfwd` of the first derivative). `False`: built on `jax.checkpoint`, as
            functions with such effects always are.
        **kwargs: The function's keyword arguments; unknown ones fail inside the function.

    Returns:
        The function's result, any pytree.

    Raises:
        TypeError: If `function` is not callable, or changes a flax module in place, or a flag is
            no bool.
        ValueError: If `preserve_rng_state=False` comes with `use_reentrant=False`, without a
            typed key among the arguments, or with effects in the function.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def block(w, x):
        ...     return jnp.sin(jnp.sin(x @ w))
        >>> def loss(w, x):
        ...     return jnp.sum(jrc.recompute(block, w, x))
        >>> jax.grad(loss)(jnp.ones((3, 3)), jnp.ones((2, 3))).shape
        (3, 3)

    Source: Paddle `distributed/fleet/recompute/recompute.py`; Chen et al., arXiv 1604.06174.
    """
    if not callable(function):
        raise TypeError(
            f"function must be the function to call, got {type(function).__name__}. "
            "Write jrc.recompute(block, x)."
        )
    check_flag(preserve_rng_state, "preserve_rng_state")
    check_flag(use_reentrant, "use_reentrant")
    if not preserve_rng_state and not use_reentrant:
        raise ValueError(
            "use_reentrant must be True with preserve_rng_state=False, got False: "
            "jax.checkpoint recomputes with the keys it has. Leave one of the two at its default."
        )
    with _modules_named(function):
        traced, sections = trace_cached(function, args, kwargs, _should_inline, _one_segment)
    program = traced.program
    if not preserve_rng_state:
        _check_no_effects(program, function)
        run = evaluate(program.jaxpr)
        return traced.run(_recompute_by_vjp(run, _with_other_keys(run, traced.inputs)))
    # What is written to a `Ref` behind a `custom_vjp` would count as differentiated.
    is_pure = not any(map(must_run_once, program.eqns))
    region = _reentrant if use_reentrant and is_pure else recomputed_region
    return traced.run(lambda *inputs: run_sections(program, sections, inputs, region))


_POLICY = Policy()
_should_inline = should_inline(_POLICY)


def _one_segment(program: Program) -> Any:
    return one_segment(program, _POLICY)


@contextmanager
def _modules_named(function: Any) -> Iterator[None]:
    """Turn flax's refusal to change a module inside a trace into an error with the way out."""
    try:
        yield
    except Exception as error:
        # flax is imported by those who use it.
        flax = sys.modules.get("flax.errors")
        if flax is None or not isinstance(error, flax.TraceContextError):
            raise
        raise TypeError(
            f"function must not change a flax module in place, got {name_of(function)!r}, "
            "which does (running statistics, random streams). Call "
            "jrc.recompute_module(module)(x) instead."
        ) from error


def _reentrant(body: Run, inputs: Sequence[Any]) -> Sequence[Any]:
    """Run a region without forward mode, as Paddle's is."""
    call = jax.custom_vjp(named_region(body))

    def forward(*primals: Any) -> tuple[Sequence[Any], Any]:
        inputs, perturbed = primal_values(primals)
        vjp, results = _vjp(lambda *inputs: recomputed_region(body, inputs), inputs, perturbed)
        return results, (vjp, perturbed)

    def backward(residuals: Any, cotangents: Sequence[Any]) -> Any:
        vjp, perturbed = residuals
        return perturbed.spread(vjp(_floating(cotangents)))

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call(*inputs)


def _recompute_by_vjp(run: Run, rerun: Run) -> Run:
    """`run`, whose backward pass differentiates `rerun` at the saved inputs."""

    @jax.custom_vjp
    def call(*inputs: Any) -> Sequence[Any]:
        return run(*inputs)

    def forward(*primals: Any) -> tuple[Sequence[Any], Any]:
        inputs, perturbed = primal_values(primals)
        return run(*inputs), (inputs, perturbed)

    def backward(residuals: Any, cotangents: Sequence[Any]) -> Any:
        # Without the barrier XLA would merge the two computations and save the first result, or
        # begin the recomputation before the backward pass reaches it.
        (inputs, perturbed), cotangents = barrier((residuals, _floating(cotangents)))
        return perturbed.spread(_vjp(rerun, inputs, perturbed)[0](cotangents))

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call


def _vjp(
    run: Run, inputs: Sequence[Any], perturbed: Perturbed
) -> tuple[Callable[..., Any], Sequence[Any]]:
    """From cotangents of the floating results to those of perturbed inputs; and the results."""

    def of_perturbed(*new: Any) -> tuple[list[Any], Sequence[Any]]:
        results = run(*perturbed.fill(inputs, new))
        return [x for x in results if is_floating(x)], results

    _, vjp, results = jax.vjp(of_perturbed, *perturbed.pick(inputs), has_aux=True)
    return vjp, results


def _floating(cotangents: Sequence[Any]) -> list[Any]:
    return [x for x in map(dense, cotangents) if is_floating(x)]


def _with_other_keys(run: Run, inputs: Sequence[Any]) -> Run:
    """`run` with other typed keys than it is given."""
    if not any(is_typed_key(x) for x in inputs):
        raise ValueError(
            "args must contain a typed key with preserve_rng_state=False, which changes "
            "the keys, got none. Pass a jax.random.key(seed), not a raw PRNGKey."
        )

    def rerun(*args: Any) -> Sequence[Any]:
        with rerun_scope():
            return run(*(other_key(x) for x in args))

    return rerun


def _check_no_effects(program: Program, function: Any) -> None:
    for eqn in program.eqns:
        if must_run_once(eqn):
            raise ValueError(
                "preserve_rng_state must be True for a function with effects, got False "
                f"and {name_of(function)!r}, which runs {eqn.primitive.name!r}. Leave it out."
            )
