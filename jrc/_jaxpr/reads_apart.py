"""Values that some equations read as values of their own: copies that take no memory.

What a product reads whole, and something else along slices, enters a region twice: `k @ y - y`.

>>> import jax, jax.numpy as jnp
>>> residual = lambda k, y: k @ y - y
>>> program = Program(jax.make_jaxpr(residual)(jnp.ones((4, 4)), jnp.ones((4, 2))))
>>> [eqn.primitive.name for eqn in with_reads_apart(program, [(1, 1)]).eqns]
['dot_general', 'copy', 'sub']
"""

from collections.abc import Collection

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from jrc._jaxpr.atoms import abstract
from jrc._jaxpr.program import Program


def with_reads_apart(program: Program, reads: Collection[tuple[int, int]]) -> Program:
    """Return the program in which some equations read copies. XLA makes none of them.

    Args:
        program: The program.
        reads: The positions of the equations, each with the number of an operand; no literals.
    """
    eqns = []
    for p, eqn in enumerate(program.eqns):
        invars = list(eqn.invars)
        for i in sorted(i for q, i in reads if q == p):
            (copy,) = jax.make_jaxpr(jnp.copy)(abstract(invars[i])).eqns
            new = Var(invars[i].aval)
            eqns.append(copy.replace(invars=[invars[i]], outvars=[new]))
            invars[i] = new
        eqns.append(eqn.replace(invars=invars))
    return Program(program.jaxpr.replace(eqns=eqns)) if reads else program
