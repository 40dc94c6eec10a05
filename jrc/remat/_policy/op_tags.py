"""One operator's call, tagged: kept or re-run, whatever the enclosing region says."""

import functools
from collections.abc import Callable
from typing import Any

from jrc._jaxpr import evaluate, tagged, trace
from jrc.remat._policy.resolution import KEEP_TAG, RECOMPUTE


def keep_op[F: Callable[..., Any]](fn: F) -> F:
    """Keep what an operator returns, although the region around it is re-run.

    Kept is its output, and what its derivative reads: neither the operator nor what feeds it is
    run again for its sake. Only the arguments of a matrix product or convolution are not kept for
    it; they follow their own makers. Of a function that cannot be differentiated twice, or has a
    `custom_vjp` or a `lax.cond` inside, the output alone is kept.

    Args:
        fn: Any JAX-traceable function of pytrees, such as `jax.nn.gelu`.

    Returns:
        The same function. The tag acts inside jrc's transforms, in loops, branches, `jax.jit` and
        `shard_map` too; not in the body of `jrc.recompute_scan`, a derivative rule or a
        `jax.checkpoint` of your own. Elsewhere it changes nothing.

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
    return _tagging(fn, KEEP_TAG, "jrc.keep_op")


def recompute_op[F: Callable[..., Any]](fn: F) -> F:
    """Re-run an operator in the backward pass, although the region around it is kept.

    Args:
        fn: Any JAX-traceable function of pytrees, such as `jax.nn.gelu`.

    Returns:
        The same function. A value is held by whoever reads it, so the tag acts only where a jrc
        transform sees the reader too: inside `jrc.apply_rules(fn)`, or in what
        `jrc.recompute_segments` leaves alone. In a region that is re-run anyway it is a region of
        its own: the operator runs once more, and the region's re-run keeps nothing of it.

    Raises:
        TypeError: If `fn` is no function.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def loss(w, x):
        ...     return jnp.sum(jrc.recompute_op(jax.nn.gelu)(x @ w) @ w)
        >>> lean = jrc.apply_rules(loss)
        >>> jax.grad(lean)(jnp.ones((3, 3)), jnp.ones((2, 3))).shape
        (3, 3)

    Source: MindSpore `Primitive.recompute()`.
    """
    return _tagging(fn, RECOMPUTE, "jrc.recompute_op")


def _tagging[F: Callable[..., Any]](fn: F, tag: str, who: str) -> F:
    if not callable(fn):
        raise TypeError(
            f"{who}: the argument is an operator, a function; got {type(fn).__name__}. "
            f"Write {who}(jax.nn.relu)(x)."
        )

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        traced = trace(fn, args, kwargs)
        return traced.run(tagged(evaluate(traced.program.jaxpr), tag))

    return call  # type: ignore[return-value]
