"""Calls that carry a word for whoever cuts the program: `jit` calls with a name of ours.

A call, and not a mark, because the word is about all that happens inside of it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

_PREFIX = "jrc_tag_"


def tagged(run: Callable[..., Any], tag: str) -> Callable[..., Any]:
    """`run`, a function of arrays, as a call that `tag_of` knows again; as it is when eager."""
    if not _is_staging():
        return run

    def call(*args: Any) -> Any:
        return run(*args)

    call.__name__ = f"{_PREFIX}{tag}"
    return jax.jit(call)


def tag_of(eqn: JaxprEqn) -> str | None:
    """The word that this call carries, if it is one of ours."""
    name = str(eqn.params.get("name", "")) if eqn.primitive.name == "jit" else ""
    return name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else None


def _is_staging() -> bool:
    """Whether a program is being traced: then even a constant is a tracer."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)
