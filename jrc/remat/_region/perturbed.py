"""Which values of a call are differentiated, as JAX says of a `custom_vjp` with symbolic zeros.

What is not differentiated (frozen weights, data) may go through what has no derivative, and what
nobody reads has no cotangent: neither may be made up, as an array of zeros would be.
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
    """Those of a list of arrays that are differentiated; no array itself, though it stands by them.

    Attributes:
        flags: One for each array.
    """

    flags: tuple[bool, ...]

    def pick(self, arrays: Iterable[Any]) -> list[Any]:
        """The arrays that are differentiated."""
        return [x for x, moves in zip(arrays, self.flags, strict=True) if moves]

    def fill(self, arrays: Iterable[Any], new: Iterable[Any]) -> list[Any]:
        """The arrays with new ones for those that are differentiated."""
        new = iter(new)
        return [next(new) if moves else x for x, moves in zip(arrays, self.flags, strict=True)]

    def spread_evenly(self, cotangents: Iterable[Any]) -> list[Any]:
        """A cotangent for each array, `None` for what is not differentiated."""
        return self.fill([None] * len(self.flags), cotangents)


def primal_values(primals: Sequence[Any]) -> tuple[list[Any], Perturbed]:
    """The values that a forward rule is given, and which of them are differentiated."""
    values = [primal.value for primal in primals]
    moves = [primal.perturbed and is_floating(primal.value) for primal in primals]
    return values, Perturbed(tuple(moves))


def read_results(cotangents: Sequence[Any]) -> Perturbed:
    """Of which results somebody reads a derivative."""
    return Perturbed(tuple(not isinstance(c, SymbolicZero) and _is_number(c) for c in cotangents))


def dense(cotangent: Any) -> Any:
    """The cotangent as an array."""
    if isinstance(cotangent, SymbolicZero):
        return zeros_of(cotangent.aval)
    return cotangent if hasattr(cotangent, "dtype") else jnp.asarray(cotangent)


def _is_number(cotangent: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(cotangent), jnp.inexact)
