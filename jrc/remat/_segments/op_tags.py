"""Tags for one call of an operator, which is saved or recomputed whatever its region does."""

import functools
from collections.abc import Callable
from typing import Any

from jrc._errors import name_of
from jrc._jaxpr import evaluate, tagged, trace
from jrc.remat._policy.notices import emit_notice, keep_tag_notice
from jrc.remat._policy.resolution import KEEP_TAG, RECOMPUTE, Policy
from jrc.remat._region.region import should_inline
from jrc.remat._segments.cut import one_segment
from jrc.remat._segments.run_sections import run_sections


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
    _check_operator(fn, "jrc.keep_op")
    name = name_of(fn)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        emit_notice(keep_tag_notice(name))
        traced = trace(fn, args, kwargs)
        return traced.run(tagged(evaluate(traced.program.jaxpr), KEEP_TAG, name))

    return call  # type: ignore[return-value]


def recompute_op[F: Callable[..., Any]](fn: F) -> F:
    """Recompute an operator in the backward pass although the region around it is saved.

    The call is a region of its own: of all values inside it, only the operands are saved. This
    needs no transform around it. What it frees are the operator's inner values. The result itself
    is saved by the operator that reads it, if the derivative of that one does: relu before a
    matrix product frees nothing and saves its operand as well. Inside `jrc.apply_rules(fn)` or
    another jrc transform the readers are seen, and recompute the result as well.

    Args:
        fn: Any JAX-traceable function of pytrees, such as `jax.nn.gelu`.

    Returns:
        The same function. Inside a region that is recomputed anyway, a `jax.checkpoint` of your
        own included, the operator runs once more.

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
    _check_operator(fn, "jrc.recompute_op")

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        policy = Policy()
        traced = trace(fn, args, kwargs, should_inline(policy))
        sections = one_segment(traced.program, policy)
        region = lambda *inputs: run_sections(traced.program, sections, inputs)  # noqa: E731
        return traced.run(tagged(region, RECOMPUTE, name_of(fn)))

    return call  # type: ignore[return-value]


def _check_operator(fn: Any, who: str) -> None:
    if not callable(fn):
        raise TypeError(
            f"{who}: fn must be an operator, a function, got {type(fn).__name__}. "
            f"Write {who}(jax.nn.relu)(x)."
        )
