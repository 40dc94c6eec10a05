"""The types that signatures share."""

from typing import Any

from jaxtyping import Array, Float, Int, Key, PyTree, Shaped

Leaf = Shaped[Array, "..."]
"""One array of a pytree, of any shape and dtype."""

Scalar = Float[Array, ""]
"""A float32 number on a device."""

Count = Int[Array, ""]
"""An int32 counter on a device."""

RandomKey = Key[Array, ""] | Any
"""A typed key (`jax.random.key`) or a raw `uint32` one (`jax.random.PRNGKey`)."""

__all__ = ["Array", "Count", "Float", "Int", "Leaf", "PyTree", "RandomKey", "Scalar"]
