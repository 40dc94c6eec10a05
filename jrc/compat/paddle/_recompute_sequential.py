"""Paddle's `recompute_sequential`, with its arguments in their order."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jrc._errors import close_to, listed, public, speaking_as
from jrc.remat import recompute_sequential as sequential

_SETTINGS = ("segments", "preserve_rng_state")


@public("jrc.compat.recompute_sequential")
def recompute_sequential(
    ctx: Mapping[str, Any], functions: Iterable[Callable[..., Any]], *args: Any
) -> Any:
    """Call functions one after another and recompute segments of them: `jrc.recompute_sequential`.

    Args:
        ctx: A dict with `"segments"`, the number of segments (1, which recomputes nothing, if left
            out), and `"preserve_rng_state"` (True if left out).
        functions: The functions, at least one, in the order of their calls.
        *args: The arguments of the first function.

    Returns:
        The result of the last function.

    Raises:
        TypeError: If `ctx` is not a dict, `functions` is not a list of functions, or a value in
            `ctx` is of another type.
        ValueError: If `ctx` has another key, or `"segments"` is out of range.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def loss(w, x):
        ...     layers = [lambda x: jnp.sin(x @ w)] * 4
        ...     return jnp.sum(jrc.compat.recompute_sequential({"segments": 2}, layers, x))
        >>> jax.grad(loss)(jnp.ones((3, 3)), jnp.ones((2, 3))).shape
        (3, 3)

    Source: Paddle `incubate/distributed/fleet/recompute`, `recompute_sequential`.
    """
    if not isinstance(ctx, Mapping):
        raise TypeError(
            f"ctx must be a dict, got {type(ctx).__name__}. Write {{'segments': 2}}, then "
            "the list of functions, or use jrc.recompute_sequential(functions, *args, segments=2)."
        )
    for key in ctx:
        if key not in _SETTINGS:
            raise ValueError(
                f"ctx must have no keys but {listed(_SETTINGS)}, got {key!r}"
                f"{close_to(str(key), _SETTINGS)}. Leave it out."
            )
    settings: dict[str, Any] = {"segments": 1, **ctx}
    with speaking_as("jrc.compat.recompute_sequential", "jrc.recompute_sequential"):
        return sequential(functions, *args, **settings)
