"""The types that signatures share."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int, Key, PyTree, Shaped

Leaf = Shaped[Array, "..."]
"""One array of a pytree, of any shape and dtype."""

Scalar = Float[Array, ""]
"""A float32 number on a device."""

Count = Int[Array, ""]
"""An int32 counter on a device."""

RandomKey = Key[Array, ""] | Any
"""A typed key (`jax.random.key`) or a raw `uint32` one (`jax.random.PRNGKey`)."""


@runtime_checkable
class Transform(Protocol):
    """An optax transform, or another object with its two functions, such as `optax.MultiSteps`."""

    @property
    def init(self) -> Callable[..., Any]:
        """Return the state before the first update, from the parameters."""
        ...

    @property
    def update(self) -> Callable[..., Any]:
        """Return updates and the new state, from gradients, state and parameters."""
        ...


__all__ = ["Array", "Count", "Float", "Int", "Leaf", "PyTree", "RandomKey", "Scalar", "Transform"]
