"""Zeros of a given type, with its sharding and the mesh axes that it varies over.

>>> import jax, jax.numpy as jnp
>>> zeros_of(jax.typeof(jnp.ones(3, jnp.bfloat16)))
Array([0, 0, 0], dtype=bfloat16)
"""

from typing import Any

from jax.interpreters import ad


def zeros_of(aval: Any) -> Any:
    """Return an array of zeros of exactly this type."""
    return ad.instantiate_zeros(ad.Zero(aval))
