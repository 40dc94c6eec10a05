"""Operator tags in a loss function: `jrc.recompute_op` and `jrc.keep_op` act in a train step."""

from collections.abc import Callable
from typing import Any

import jax

from jrc._errors import named_like
from jrc._jaxpr import tag_of, walk
from jrc.remat import apply_rules


def with_op_tags(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the loss function with `jrc.apply_rules` around it where it has tagged operators.

    Args:
        loss_fn: A loss function of positional arguments, pytrees of arrays.

    Returns:
        The same function. Without tags its program is unchanged; to see that, it is traced once
        more.
    """
    ruled = apply_rules(loss_fn)

    @named_like(loss_fn)
    def call(*args: Any) -> Any:
        return (ruled if _has_tags(loss_fn, args) else loss_fn)(*args)

    return call


def _has_tags(loss_fn: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    def run(*args: Any) -> None:
        loss_fn(*args)  # whose result may hold anything

    return any(tag_of(eqn) is not None for eqn, _ in walk(jax.make_jaxpr(run)(*args)))
