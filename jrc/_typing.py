"""The types that signatures share."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Float, Int, Integer, Key, Num, PyTree, Shaped, UInt

AnyArray = Any
"""Within `Float[…]`: an array of JAX or NumPy, or a `jax.ShapeDtypeStruct`."""

Real = float | np.integer | np.floating
"""A real number of Python or of NumPy."""

Whole = int | np.integer
"""An integer of Python or of NumPy."""

Leaf = Shaped[Array | np.ndarray, "..."] | np.generic | complex
"""One array of a pytree, of any shape and dtype, or a number of Python or of NumPy."""

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


__all__ = [
    "AnyArray",
    "Array",
    "Count",
    "Float",
    "Int",
    "Integer",
    "Leaf",
    "Num",
    "PyTree",
    "RandomKey",
    "Real",
    "Scalar",
    "Shaped",
    "Transform",
    "UInt",
    "Whole",
]
