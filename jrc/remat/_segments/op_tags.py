"""Tags for one call of an operator, which is saved or recomputed whatever its region does."""

import functools
from collections.abc import Callable
from typing import Any

from jrc._errors import public, running_name
from jrc._jaxpr import evaluate, tagged, trace
from jrc.remat._policy.resolution import KEEP_TAG, RECOMPUTE, Policy
from jrc.remat._region.effects import must_run_once
from jrc.remat._region.interpreter import EquationRange, inner_function
from jrc.remat._region.region import Run, recomputed_region, should_inline


@public("jrc.keep_op")
def keep_op[F: Callable[..., Any]](fn: F) -> F:
    """Save the results of an operator although the region around it is recomputed.

    Its results are saved, and the values that its derivative reads: neither the operator nor what
    comes before it is recomputed for its sake. Operands of a matrix product or a convolution are
    not saved for it. Of a function that cannot be differentiated twice, or that contains a
    `custom_vjp` or a `lax.cond`, only the results are saved.

    Args:
        fn: Any JAX-traceable function of pytrees, such as `jax.nn.gelu`.

    Returns:
        The same function. The tag needs a jrc transform around it, because the region that would
        recompute a value is what saves it. It acts in loops, branches, `jax.jit` and `shard_map`
        inside of the transform; not in the body of `jrc.recompute_scan`, a derivative rule or a
        `jax.checkpoint` of your own. Elsewhere it has no effect, and `jrc.explain` warns of that.

    Raises:
        TypeError: If `fn` is no function.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def block(w, x):
        ...     return jnp.sin(jrc.keep_op(jnp.tanh)(x @ w))
        >>> def loss(w, x):
        ...     return jnp.sum(jrc.recompute(block, w, x))
        >>> jax.grad(loss)(jnp.ones((3, 3)), jnp.ones((2, 3))).shape
        (3, 3)

    Source: MindSpore `Primitive.recompute(False)`.
    """
    _check_operator(fn)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        traced = trace(fn, args, kwargs)
        return traced.run(tagged(evaluate(traced.program.jaxpr), KEEP_TAG))

    return call  # type: ignore[return-value]


@public("jrc.recompute_op")
def recompute_op[F: Callable[..., Any]](fn: F) -> F:
    """Recompute an operator in the backward pass although the region around it is saved.

    The call is a region of its own: of all values inside it, only the operands are saved. This
    needs no transform around it, and frees the operator's inner values. The result itself is still
    saved if the derivative of an operator that reads it reads it too, as that of a matrix product
    does: relu in front of one then has both its operand and its result saved. Inside
    `jrc.apply_rules(fn)` or another jrc transform the readers are in the region as well, and the
    result is recomputed for them.

    Args:
        fn: Any JAX-traceable function of pytrees, such as `jax.nn.gelu`.

    Returns:
        The same function. Inside a region that is recomputed anyway, a `jax.checkpoint` of your
        own included, the operator may run once more.

    Raises:
        TypeError: If `fn` is no function.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def loss(w, x):
        ...     return jnp.sum(jrc.recompute_op(jax.nn.gelu)(x @ w) @ w)
        >>> w, x = jnp.ones((3, 3)), jnp.ones((2, 3))
        >>> str(jax.make_jaxpr(jax.grad(loss))(w, x)).count("tanh")
        2
        >>> jax.grad(jrc.apply_rules(loss))(w, x).shape
        (3, 3)

    Source: MindSpore `Primitive.recompute()`.
    """
    _check_operator(fn)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        traced = trace(fn, args, kwargs, should_inline(Policy()))
        return traced.run(tagged(_region(traced.program.jaxpr), RECOMPUTE))

    return call  # type: ignore[return-value]


def _region(jaxpr: Any) -> Run:
    """A program as a region that saves what tags inside save, and not its own results."""
    if any(map(must_run_once, jaxpr.eqns)):
        return evaluate(jaxpr)
    body = inner_function(jaxpr, Policy(), EquationRange.run_recomputed)
    return lambda *inputs: recomputed_region(body, inputs)


def _check_operator(fn: Any) -> None:
    if not callable(fn):
        raise TypeError(
            f"fn must be an operator, a function, got {type(fn).__name__}. "
            f"Write {running_name()}(jax.nn.relu)(x)."
        )
