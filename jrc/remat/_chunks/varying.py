"""Zeros inside of `shard_map`, of the type of what is added to them."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def varying_axes(values: Iterable[Any]) -> tuple[str, ...]:
    """Return the mesh axes that any of some values varies over."""
    return tuple(sorted({name for x in values for name in jax.typeof(x).mat.varying}))


def varying_zeros(shape: Sequence[int], dtype: Any, axes: tuple[str, ...]) -> jax.Array:
    """Return zeros that vary over these mesh axes."""
    zeros = jnp.zeros(shape, dtype)
    return jax.lax.pcast(zeros, axes, to="varying") if axes else zeros
