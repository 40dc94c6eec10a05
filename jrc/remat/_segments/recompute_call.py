"""One segment as a call: run a function now, and again in the backward pass."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jrc._jaxpr import evaluate, trace
from jrc._rng import other_key
from jrc._tree import is_floating, is_typed_key
from jrc._validate import check_flag
from jrc.remat._policy.resolution import Policy
from jrc.remat._region.barrier import barrier
from jrc.remat._region.interpreter import recomputed_region, should_inline
from jrc.remat._region.perturbed import Perturbed, dense, primal_values
from jrc.remat._region.rerun_scope import rerun_scope
from jrc.remat._segments.cut import one_segment
from jrc.remat._segments.recompute_segments import run_sections


def recompute(
    function: Callable[..., Any],
    *args: Any,
    preserve_rng_state: bool = True,
    use_reentrant: bool = True,
    **kwargs: Any,
) -> Any:
    """Call a function as one segment: its intermediates are re-run, its inputs are kept.

    What goes through `jrc.keep_op` inside, and what collectives return, is held and not re-run.

    Args:
        function: Any pure JAX-traceable function of pytrees. What it closes over gets gradients
            too. It is traced once, so a state that it threads (running statistics) is updated
            once; what it changes in place (an nnx module, a dict) is lost: return it.
        *args: Its arguments; leaves that are no JAX arrays stay what they are.
        preserve_rng_state: `True`: the re-run draws the same random bits. `False`: typed keys
            among the arguments are folded with a constant in the re-run, which then draws OTHER
            bits: the gradient is that of another mask than the forward pass used, a biased one.
            This is the seed's semantics and needs `use_reentrant=True`; nothing inside is held.
        use_reentrant: `True`: built on `jax.custom_vjp`, which has no forward mode (`jax.jvp`,
            `jax.jacfwd` of the first derivative). `False`: built on `jax.checkpoint`.
        **kwargs: The function's keyword arguments; unknown ones fail inside the function.

    Returns:
        The function's result, any pytree.

    Raises:
        TypeError: If `function` is not callable, or a switch neither `True` nor `False`.
        ValueError: If `preserve_rng_state=False` comes with `use_reentrant=False`, or without a
            typed key among the arguments.

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
            f"jrc.recompute: the first argument is the function to call; got "
            f"{type(function).__name__}. Write jrc.recompute(block, x)."
        )
    check_flag(preserve_rng_state, "preserve_rng_state", "jrc.recompute")
    check_flag(use_reentrant, "use_reentrant", "jrc.recompute")
    if not preserve_rng_state and not use_reentrant:
        raise ValueError(
            "jrc.recompute: preserve_rng_state=False needs use_reentrant=True, because "
            "jax.checkpoint re-runs with the keys it has. Keep one of the two at its default."
        )
    policy = Policy()
    traced = trace(function, args, kwargs, should_inline(policy))
    program = traced.program
    if not preserve_rng_state:
        run = evaluate(program.jaxpr)
        return traced.run(_custom_vjp(run, _with_other_keys(run, traced.inputs)))
    region = _reentrant if use_reentrant else recomputed_region
    cuts = one_segment(program, policy)
    return traced.run(lambda *inputs: run_sections(program, cuts, inputs, region))


def _reentrant(body: Callable[..., Sequence[Any]], inputs: Sequence[Any]) -> Sequence[Any]:
    """A region without forward mode, as the seed's is."""

    @jax.custom_vjp
    def call(*inputs: Any) -> Sequence[Any]:
        return body(*inputs)

    def forward(*primals: Any) -> tuple[Sequence[Any], Any]:
        inputs, perturbed = primal_values(primals)
        pull, results = _pull(lambda *inputs: recomputed_region(body, inputs), inputs, perturbed)
        return results, (pull, perturbed)

    def backward(residuals: Any, cotangents: Sequence[Any]) -> Any:
        pull, perturbed = residuals
        return perturbed.spread_evenly(pull(_of_floats(cotangents)))

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call(*inputs)


def _custom_vjp(
    run: Callable[..., Sequence[Any]], run_again: Callable[..., Sequence[Any]]
) -> Callable[..., Any]:
    """`run`, whose backward pass differentiates `run_again` at the saved inputs."""

    @jax.custom_vjp
    def call(*inputs: Any) -> Sequence[Any]:
        return run(*inputs)

    def forward(*primals: Any) -> tuple[Sequence[Any], Any]:
        inputs, perturbed = primal_values(primals)
        return run(*inputs), (inputs, perturbed)

    def backward(residuals: Any, cotangents: Sequence[Any]) -> Any:
        # Without the barrier XLA would see one computation twice and keep its first result, or
        # start the re-run before the backward pass arrives here.
        (inputs, perturbed), cotangents = barrier((residuals, _of_floats(cotangents)))
        return perturbed.spread_evenly(_pull(run_again, inputs, perturbed)[0](cotangents))

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call


def _pull(
    run: Callable[..., Sequence[Any]], inputs: Sequence[Any], perturbed: Perturbed
) -> tuple[Callable[..., Any], Sequence[Any]]:
    """From the cotangents of the floating results to those of what is differentiated."""

    def floats(*moved: Any) -> tuple[list[Any], Sequence[Any]]:
        results = run(*perturbed.fill(inputs, moved))
        return [x for x in results if is_floating(x)], results

    _, pull, results = jax.vjp(floats, *perturbed.pick(inputs), has_aux=True)
    return pull, results


def _of_floats(cotangents: Sequence[Any]) -> list[Any]:
    return [x for x in map(dense, cotangents) if is_floating(x)]


def _with_other_keys(
    run: Callable[..., Sequence[Any]], inputs: Sequence[Any]
) -> Callable[..., Sequence[Any]]:
    if not any(is_typed_key(x) for x in inputs):
        raise ValueError(
            "jrc.recompute: preserve_rng_state=False changes the typed keys that the function "
            "is given, and there is none. Pass a jax.random.key(seed), not a raw PRNGKey."
        )

    def run_again(*args: Any) -> Sequence[Any]:
        with rerun_scope():
            return run(*(other_key(x) for x in args))

    return run_again
