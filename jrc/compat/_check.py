"""What a loss function may be and return."""

from typing import Any

import jax.numpy as jnp

from jrc._jaxpr import Traced, is_atom
from jrc._tree import named_leaves
from jrc._typing import PyTree


def check_function(who: str, loss_fn: Any) -> None:
    """Refuse the value of a loss, which does not know how it was made."""
    if not callable(loss_fn):
        raise TypeError(
            f"{who}: the loss is a function of the parameters, loss_fn(params, *args); got "
            f"{type(loss_fn).__name__}. A value does not know how it was made: pass the function, "
            "and its arguments behind the parameters."
        )


def leaf_names(who: str, params: PyTree) -> list[str]:
    """The names of all parameters in tree order, of which no two are the same."""
    names = [name for name, _ in named_leaves(params)]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"{who}: parameters are told apart by their path; two are named {name!r}. Use no "
                "'/' in a dict's keys."
            )
    return names


def check_loss(who: str, fn: str, traced: Traced, has_aux: bool) -> None:
    """The loss is one real number, of shape () or, as the seed's, (1,)."""
    value = traced.result.fill(traced.program.jaxpr.outvars)
    if has_aux and not (isinstance(value, tuple | list) and len(value) == 2):
        raise TypeError(
            f"{who}: with has_aux=True the loss function returns (loss, aux); `{fn}` returned "
            f"{_word(value)}."
        )
    loss = value[0] if has_aux else value
    if isinstance(loss, tuple | list):
        raise TypeError(
            f"{who}: the loss is one number; `{fn}` returned {_word(loss)}. Pass has_aux=True if "
            "that is (loss, aux)."
        )
    aval = loss.aval if is_atom(loss) else None
    if aval is None or not jnp.issubdtype(aval.dtype, jnp.floating) or aval.shape not in ((), (1,)):
        raise ValueError(
            f"{who}: the loss is one real number, an array of shape () or (1,); `{fn}` returned "
            f"{_word(loss)}. Take jnp.mean of it."
        )


def _word(value: Any) -> str:
    """What arrived, for a sentence: `float32[4,2]`, `a tuple of 3`."""
    if is_atom(value):
        return f"{value.aval.dtype}[{','.join(map(str, value.aval.shape))}]"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return type(value).__name__
