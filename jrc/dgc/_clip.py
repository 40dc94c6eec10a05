"""Local gradient clipping, before anything is accumulated."""

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from jrc._typing import Array, Float, Real

CLIP_SCALINGS = ("sqrt", "rsqrt")
"""How the bound grows with the number of replicas: `C sqrt(N)`, or `C / sqrt(N)`."""


def clip_bound(max_norm: Real | Array, replicas: int, scaling: str = "sqrt") -> Real | Array:
    """Return the bound of one replica's gradient, for a bound C of the aggregated one.

    The sum of N independent gradients has about sqrt(N) times the norm of one. Where the loss was
    divided by N and gradients are summed, each is bounded to `C / sqrt(N)` (`"rsqrt"`); mean
    gradients are N times as long, and so is their bound, `C sqrt(N)` (`"sqrt"`).

    Args:
        max_norm: C.
        replicas: N.
        scaling: `"sqrt"` or `"rsqrt"`.

    Returns:
        The bound.

    >>> clip_bound(2.0, 4), clip_bound(2.0, 4, "rsqrt")
    (4.0, 1.0)
    """
    root = math.sqrt(replicas)
    return max_norm * root if scaling == "sqrt" else max_norm / root


def clip_factor(
    gradient: Float[Array, "..."],
    max_norm: Real | Array,
    replicas: int,
    scaling: str = "sqrt",
    axes: Sequence[str] = (),
) -> Array:
    r"""Return the factor that bounds a local gradient: `min(1, C sqrt(N) / ||g||)`.

    Args:
        gradient: One tensor's local gradient, float32.
        max_norm: C.
        replicas: N.
        scaling: `"sqrt"`, or `"rsqrt"` for a bound of `C / sqrt(N)`.
        axes: Manual axes over which the tensor is split, and its norm added up.

    Returns:
        A float32 scalar in [0, 1].

    Source: Lin et al., "Deep Gradient Compression", arXiv:1712.01887, section 3.1.
    """
    # Squares of entries from 1e19 on overflow, and those below 1e-19 vanish.
    largest = jnp.max(jnp.abs(gradient), initial=0.0)
    if axes:
        largest = lax.pmax(largest, tuple(axes))
    scale = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1.0)
    squares = jnp.sum(jnp.square(gradient / scale))
    norm = scale * jnp.sqrt(lax.psum(squares, tuple(axes)) if axes else squares)
    bound = clip_bound(max_norm, replicas, scaling)
    # A norm of zero must not divide.
    return jnp.where(norm > bound, bound / jnp.where(norm > bound, norm, 1.0), 1.0)
