"""The seed's function for gradients by name."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from jrc._typing import PyTree
from jrc.compat._block import Callback
from jrc.compat._gradients import Asked, gradients


def append_backward(
    loss_fn: Callable[..., Any],
    params: PyTree,
    *args: Any,
    parameter_list: Sequence[str] | None = None,
    no_grad_set: Collection[str] | None = None,
    callbacks: Callback | Sequence[Callback] | None = None,
    checkpoints: Sequence[str] | None = None,
    has_aux: bool = False,
) -> Any:
    """The gradients of a loss, as pairs of name and gradient.

    A parameter is named by its path in the tree (`layer_0/w`), an intermediate by its `jrc.mark`
    (a name used twice as `name`, `name#2`, …; several arrays marked at once as `name/0`, …). The
    name of a pair may be asked for and stopped as well.
    What gets no gradient has no pair: leaves that are neither floating nor complex numbers, and
    those that reach the loss through `lax.stop_gradient` alone, or not at all. (Of what enters a
    `jax.checkpoint` region of its own, JAX with `jax_remat3` does not say so: there the gradient is
    zeros.) What is not asked for is not computed.

    Args:
        loss_fn: `loss_fn(params, *args)`, which returns a floating array of shape () or (1,).
        params: Parameters, any pytree; NumPy arrays of floating or complex numbers and Python's
            own count as arrays.
        *args: The other arguments of the loss function.
        parameter_list: Names of what to differentiate for, in the order of the pairs. A mark asks
            for the gradient with respect to that intermediate. `None` is every parameter, in the
            order of the tree.
        no_grad_set: Names that get no gradient: a parameter has no pair, even if it is listed; at
            a mark the flow stops, for all that lies before it.
        callbacks: One or more functions `callback(block, context)`. Each is called once for every
            forward equation that gets a gradient, last one first, while the backward program is
            built: at each call of this function, under `jax.jit` when it is traced. `block` is
            the forward program, a `Block`. `context` is a dict of its own that maps the name of
            each gradient (`layer_0/w@GRAD`) to the forward name, and `"__current_op_desc__"` to
            the gradient operator, an `Operator`. What is not named otherwise is called after its
            operator, `dot_general_0`, or `args/0`.
        checkpoints: Marks between which intermediates are re-run instead of kept, cut as
            `jrc.recompute_segments` does with `rule="fluid"`.
        has_aux: Whether the loss function returns `(loss, aux)`.

    Returns:
        A list of `ParamGrad`s, each a pair `(name, grad)`; with `has_aux`, the list and `aux`.

    Raises:
        TypeError: If the loss function is none, or names or callbacks are of another kind. A set
            has no order, and so is no `parameter_list`.
        ValueError: If a name is unknown, names a parameter and a mark or two marks' arrays, or
            stands inside a loop or another construct too; if the loss is not one real number.

    Example:
        >>> import jax.numpy as jnp
        >>> def loss_fn(params, x):
        ...     hidden = jrc.mark(x * params["a"], "hidden")
        ...     return jnp.sum(hidden * params["b"])
        >>> params = {"a": jnp.float32(2.0), "b": jnp.float32(3.0)}
        >>> pairs = jrc.compat.append_backward(loss_fn, params, jnp.ones(2))
        >>> [(name, float(grad)) for name, grad in pairs]
        [('a', 6.0), ('b', 4.0)]
        >>> pairs = jrc.compat.append_backward(
        ...     loss_fn, params, jnp.ones(2), parameter_list=["hidden", "a"], no_grad_set={"a"}
        ... )
        >>> [(name, grad.tolist()) for name, grad in pairs]
        [('hidden', [3.0, 3.0])]

    Source: Paddle `python/paddle/fluid/backward.py`, `append_backward`.
    """
    asked = Asked(parameter_list, no_grad_set, callbacks, checkpoints, has_aux)
    found = gradients("jrc.compat.append_backward", loss_fn, params, args, asked)
    return (found.pairs, found.value[1]) if has_aux else found.pairs
