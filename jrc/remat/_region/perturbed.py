"""Which arguments of a `custom_vjp` function are perturbed, and which results are read.

JAX reports both through symbolic zeros. An argument that is not perturbed (frozen weights, data)
may pass through operators that have no derivative, and a result that no derivative reads has no
cotangent: an array of zeros must stand for neither.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jrc._jaxpr import zeros_of
from jrc._tree import is_floating


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Perturbed:
    """Which arrays of a list are perturbed; static, so that it can stand among residuals.

    Attributes:
        flags: One for each array.
    """

    flags: tuple[bool, ...]

    def pick(self, arrays: Iterable[Any]) -> list[Any]:
        """Return the perturbed arrays."""
        return [x for x, perturbed in zip(arrays, self.flags, strict=True) if perturbed]

    def fill(self, arrays: Iterable[Any], new: Iterable[Any]) -> list[Any]:
        """Return the arrays with the perturbed ones replaced by `new`, in order."""
        new = iter(new)
        return [
            next(new) if perturbed else x for x, perturbed in zip(arrays, self.flags, strict=True)
        ]

    def spread(self, cotangents: Iterable[Any]) -> list[Any]:
        """Return a cotangent for each array, `None` for one that is not perturbed."""
        return self.fill([None] * len(self.flags), cotangents)


def primal_values(primals: Sequence[Any]) -> tuple[list[Any], Perturbed]:
    """Return the values that a forward rule is given, and which of them are perturbed."""
    values = [primal.value for primal in primals]
    flags = [primal.perturbed and is_floating(primal.value) for primal in primals]
    return values, Perturbed(tuple(flags))


def read_results(cotangents: Sequence[Any]) -> Perturbed:
    """Return which results have a cotangent that is not a symbolic zero."""
    return Perturbed(tuple(not isinstance(c, SymbolicZero) and _is_number(c) for c in cotangents))


def dense(cotangent: Any) -> Any:
    """Return the cotangent as an array."""
    if isinstance(cotangent, SymbolicZero):
        return zeros_of(cotangent.aval)
    return cotangent if hasattr(cotangent, "dtype") else jnp.asarray(cotangent)


def _is_number(cotangent: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(cotangent), jnp.inexact)
