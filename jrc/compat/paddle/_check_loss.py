"""Checks of a loss function and of what it returns."""

from typing import Any

import jax.numpy as jnp

from jrc._jaxpr import Traced, is_atom
from jrc._tree import named_leaves
from jrc._typing import PyTree


def check_function(loss_fn: Any) -> None:
    """Raise if the loss is not a function: Paddle takes a variable, which knows its program."""
    if not callable(loss_fn):
        raise TypeError(
            "loss_fn must be a function of the parameters, loss_fn(params, *args), got "
            f"{type(loss_fn).__name__}. Pass the function, then the parameters, then its other "
            "arguments."
        )


def leaf_names(params: PyTree) -> list[str]:
    """Return the names of all parameters in tree order, or raise if two are equal."""
    names = [name for name, _ in named_leaves(params)]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"params must have a different path for each leaf, got {name!r} twice. Use "
                "no '/' in a dict's keys."
            )
    return names


def check_loss(fn: str, traced: Traced, has_aux: bool) -> None:
    """Raise unless the loss is one real number, of shape () or, as in Paddle, (1,)."""
    value = traced.result.fill(traced.program.jaxpr.outvars)
    if has_aux and not (isinstance(value, tuple | list) and len(value) == 2):
        raise TypeError(
            f"loss_fn must return (loss, aux) with has_aux=True, got {_kind(value)} from "
            f"`{fn}`. Return that pair, or leave has_aux out."
        )
    loss = value[0] if has_aux else value
    if isinstance(loss, tuple | list):
        raise TypeError(
            f"loss_fn must return one real number, got {_kind(loss)} from `{fn}`. Pass "
            "has_aux=True if that is (loss, aux)."
        )
    aval = loss.aval if is_atom(loss) else None
    if aval is None or not jnp.issubdtype(aval.dtype, jnp.floating) or aval.shape not in ((), (1,)):
        raise ValueError(
            "loss_fn must return one real number, an array of shape () or (1,), got "
            f"{_kind(loss)} from `{fn}`. Take jnp.mean of it."
        )


def _kind(value: Any) -> str:
    """Return the type of a value as text: `float32[4,2]`, `a tuple of 3`."""
    if is_atom(value):
        return f"{value.aval.dtype}[{','.join(map(str, value.aval.shape))}]"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return type(value).__name__
