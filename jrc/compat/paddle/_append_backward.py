"""Paddle's `append_backward`: gradients by name."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from jrc._errors import public
from jrc._typing import PyTree
from jrc.compat.paddle._callbacks import Callback
from jrc.compat.paddle._gradients import Arguments, gradients
from jrc.compat.paddle._names import Name


@public("jrc.compat.append_backward")
def append_backward(
    loss_fn: Callable[..., Any],
    params: PyTree,
    *args: Any,
    parameter_list: Sequence[Name] | None = None,
    no_grad_set: Collection[Name] | None = None,
    callbacks: Callback | Sequence[Callback] | None = None,
    checkpoints: Sequence[str] | None = None,
    has_aux: bool = False,
) -> Any:
    """Return the gradients of a loss, as pairs of name and gradient.

    A parameter is named by its path in the tree (`layer_0/w`), an intermediate by its `jrc.mark`
    (a name used twice as `name`, `name#2`, …; several arrays marked at once as `name/0`, …). Both
    lists of names also take the name of a pair, or the pair.

    A value without a gradient has no pair: leaves that are neither floating nor complex numbers,
    and those that reach the loss through `lax.stop_gradient` only, or not at all. (For an input of
    a `jax.checkpoint` region of its own, JAX with `jax_remat3` does not report that: there the
    gradient is zeros.) Gradients that are not requested are not computed.

    Args:
        loss_fn: `loss_fn(params, *args)`, which returns a floating array of shape () or (1,).
        params: Parameters, any pytree; floating and complex NumPy arrays and Python numbers count
            as arrays.
        *args: The other arguments of the loss function.
        parameter_list: Names of the values to differentiate with respect to, in the order of the
            pairs; a mark is an intermediate. `None` is every parameter, in the order of the tree.
        no_grad_set: Names without a gradient: a parameter has no pair, even if it is listed; at a
            mark the gradient stops, for everything before it.
        callbacks: One or more functions `callback(block, context)`. Each is called once for every
            forward equation that gets a gradient, last one first, while the backward program is
            built: at each call of this function, under `jax.jit` when it is traced. `block` is
            the forward program, a `Block`. `context` is a new dict that maps the name of each
            gradient (`layer_0/w@GRAD`) to the forward name, and `"__current_op_desc__"` to the
            gradient operator, an `Operator`. A value without a name gets one from its operator,
            `dot_general_0`, or its argument, `args/0`.
        checkpoints: Marks between which intermediates are recomputed and not saved, as
            `jrc.recompute_segments` does with `rule="fluid"`. A name that is no mark is ignored,
            with a warning.
        has_aux: Whether the loss function returns `(loss, aux)`.

    Returns:
        A list of `ParamGrad`s, each a pair `(name, grad)`; with `has_aux`, the list and `aux`.

    Raises:
        TypeError: If `loss_fn` is not a function, or names or callbacks are of another type; a set
            has no order, and is not taken as `parameter_list`.
        ValueError: If a name is unknown, refers to several values or to a mark inside a loop or
            another construct, or if the loss is not one real number.

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
    options = Arguments(parameter_list, no_grad_set, callbacks, checkpoints, has_aux)
    found = gradients(loss_fn, params, args, options)
    return (found.pairs, found.value[1]) if has_aux else found.pairs
