"""Tagged calls: `jit` calls whose name tells a transform what to do with all that is inside."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

_PREFIX = "jrc_tag_"


def tagged(run: Callable[..., Any], tag: str) -> Callable[..., Any]:
    """Return a function of arrays as a call with a tag; unchanged where nothing is traced.

    Args:
        run: The function.
        tag: One word; `tag_of` returns it.
    """
    if not _is_staging():
        return run

    def call(*args: Any) -> Any:
        return run(*args)

    call.__name__ = f"{_PREFIX}{tag}"
    return jax.jit(call)


def tag_of(eqn: JaxprEqn) -> str | None:
    """Return the tag of a call, `None` if it has none."""
    name = str(eqn.params.get("name", "")) if eqn.primitive.name == "jit" else ""
    return name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else None


def _is_staging() -> bool:
    """Whether a program is being traced: then even a constant is a tracer."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)
