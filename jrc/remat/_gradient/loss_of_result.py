"""Check what a loss function returns, and say what it may be if it is no loss.

>>> import jax.numpy as jnp
>>> loss_of_result((jnp.float32(2), {"x": 1}), True, "loss", lambda: None, False)
(Array(2., dtype=float32), [1])
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jrc._errors import running_name
from jrc._tree import is_number


def loss_of_result(
    out: Any, has_aux: bool, fn: str, differentiated: Callable[[], Any], is_wrapped: bool
) -> tuple[Any, list[Any]]:
    """Return the loss and the auxiliary leaves of a function's result, after checking it.

    Args:
        out: What the function returned.
        has_aux: Whether that is to be a pair of the loss and anything.
        fn: The function's name.
        differentiated: Returns the arguments that are differentiated: asked for in an error alone.
        is_wrapped: Whether the function is a transform of another one.

    Raises:
        TypeError: If the result is no floating scalar, or no pair with one.
    """
    if has_aux and not (isinstance(out, tuple | list) and len(out) == 2):
        raise TypeError(
            f"`{fn}` must return a pair (loss, aux) with has_aux=True, got "
            f"{_described(out)}. If it returns the loss alone, leave has_aux out."
        )
    value, more = out if has_aux else (out, None)
    if _is_loss(value):
        return jnp.asarray(value), jax.tree.leaves(more)
    given = differentiated()
    if is_wrapped and (by := _gradient_of(value, given)):
        raise TypeError(
            f"fn must return a floating scalar, the loss, got {_described(value)} from "
            f"what looks like {by}(`{fn}`). Pass `{fn}` itself: {running_name()} differentiates it."
        )
    if _is_step(out, given):
        raise TypeError(
            f"`{fn}` must return a floating scalar, the loss, got {_described(out)} with new "
            "values of its argument, as a train step returns. Plan the loss, jrc.plan(loss, ..., "
            "reserve=opt_state), and call plan.apply(loss) in the step; argnums=None of jrc.plan "
            "and jrc.explain takes the step as it is."
        )
    raise TypeError(
        f"`{fn}` must return a floating scalar, the loss, got {_described(value)}. "
        f"{_way_out(value, has_aux, is_wrapped)}"
    )


def _gradient_of(value: Any, given: Any) -> str | None:
    """Return the transform of JAX that may have returned a value; `None` if it is no gradient."""
    # One array may be anything.
    if is_number(value):
        return None
    if _shapes(value) == _shapes(given):
        return "jax.grad"
    pair = isinstance(value, tuple) and len(value) == 2 and _is_loss(value[0])
    same = pair and not is_number(value[1]) and _shapes(value[1]) == _shapes(given)
    return "jax.value_and_grad" if same else None


def _is_step(out: Any, given: Any) -> bool:
    """Return whether a result has new values of the arguments that are differentiated."""
    if not isinstance(out, tuple | list):
        return False
    # A loss and one array may be a loss and its auxiliary result.
    is_loss_first = bool(out) and _is_loss(out[0])
    return any(
        _shapes(each) == _shapes(given) and not (is_loss_first and is_number(each)) for each in out
    )


def _shapes(tree: Any) -> Any:
    """Return a tree's structure and the shapes of its leaves."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [getattr(leaf, "shape", None) for leaf in leaves]


def _way_out(value: Any, has_aux: bool, is_wrapped: bool) -> str:
    """Return the last sentence of the error for a result that is no loss."""
    if not is_number(value) and not has_aux:
        return "Return the loss alone; if it returns (loss, aux), pass has_aux=True."
    if is_number(value) and jnp.issubdtype(jnp.result_type(value), jnp.complexfloating):
        return "Take the real part of what it returns, or its absolute value."
    more = "; in the place of jax.grad of a loss pass the loss itself" if is_wrapped else ""
    return f"Sum or average what it returns{more}."


def _is_loss(value: Any) -> bool:
    """Return whether a value is a real floating scalar."""
    if not is_number(value) or jnp.shape(value) != ():
        return False
    return jnp.issubdtype(jnp.result_type(value), jnp.floating)


def _described(value: Any) -> str:
    """Return a value's type for an error: `float32[4]`, or `dict`."""
    if not is_number(value):
        return type(value).__name__
    return f"{jnp.result_type(value)}{list(jnp.shape(value))}"
