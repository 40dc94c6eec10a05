"""The programs inside of a `lax.custom_linear_solve`, such as that of `jnp.linalg.solve`.

>>> import jax, jax.numpy as jnp
>>> solve = jax.make_jaxpr(jnp.linalg.solve)(jnp.ones((5, 3, 3)), jnp.ones((5, 3, 1)))
>>> from jrc._jaxpr.inline import inline_all
>>> (eqn,) = [e for e in inline_all(solve.jaxpr).eqns if e.primitive.name == "custom_linear_solve"]
>>> [(each.name, each.operands) for each in solver_programs(eqn)][:2]
[('matvec', (0, 6)), ('vecmat', (1, 6))]
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn


class SolverProgram(NamedTuple):
    """One of the programs.

    Attributes:
        name: What JAX calls it: a product with the matrix, with its transpose, or a solution.
        jaxpr: The program.
        operands: The positions of its inputs among the operands of the equation.
    """

    name: str
    jaxpr: Jaxpr
    operands: tuple[int, ...]


def solver_programs(eqn: JaxprEqn) -> list[SolverProgram]:
    """Return the programs; that of the transpose may be missing."""
    jaxprs, lengths = eqn.params["jaxprs"], eqn.params["const_lengths"]
    sides = tuple(range(sum(lengths), len(eqn.invars)))
    found, first = [], 0
    for name, jaxpr, length in zip(jaxprs._fields, jaxprs, lengths, strict=True):
        if jaxpr is not None:
            found.append(SolverProgram(name, jaxpr, (*range(first, first + length), *sides)))
        first += length
    return found


def with_solver_programs(eqn: JaxprEqn, jaxprs: Mapping[str, Jaxpr]) -> dict[str, Any]:
    """Return the parameters of the equation with other programs of the same inputs and results."""
    return eqn.params | {"jaxprs": eqn.params["jaxprs"]._replace(**jaxprs)}
