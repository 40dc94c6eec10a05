"""Local gradient clipping, before anything is accumulated."""

import math

import jax.numpy as jnp

from jrc._typing import Array, Float


def clip_factor(gradient: Float[Array, "..."], max_norm: float | Array, replicas: int) -> Array:
    r"""The factor that bounds a local gradient: `min(1, C sqrt(N) / ||g||)`.

    The sum of N independent gradients has about sqrt(N) times the norm of one, so a bound C on
    the summed gradient of a loss divided by N is `C / sqrt(N)` there and `C sqrt(N)` for the mean
    gradient of each replica.

    Args:
        gradient: One tensor's local mean gradient, float32.
        max_norm: C.
        replicas: N.

    Returns:
        A float32 scalar in [0, 1].

    Source: Lin et al., "Deep Gradient Compression", arXiv:1712.01887, section 3.1.
    """
    # Squares of entries from 1e19 on overflow, and those below 1e-19 vanish.
    largest = jnp.max(jnp.abs(gradient), initial=0.0)
    scale = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1.0)
    norm = scale * jnp.linalg.norm((gradient / scale).reshape(-1))
    bound = max_norm * math.sqrt(replicas)
    # A norm of zero must not divide.
    return jnp.where(norm > bound, bound / jnp.where(norm > bound, norm, 1.0), 1.0)
