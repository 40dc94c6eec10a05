"""Copies of equations for some of their readers.

>>> import jax, jax.numpy as jnp
>>> program = Program(jax.make_jaxpr(lambda x: (lambda y: (y + x, y * x))(jnp.sin(x)))(1.0))
>>> [eqn.primitive.name for eqn in copy_for_readers(program, {2: [0]}).eqns]
['sin', 'add', 'sin', 'mul']
"""

from collections.abc import Mapping, Sequence

from jax.extend.core import Var

from jrc._jaxpr.atoms import substitute
from jrc._jaxpr.program import Program


def copy_for_readers(program: Program, copied: Mapping[int, Sequence[int]]) -> Program:
    """Return the program in which some equations read copies.

    Args:
        program: The program.
        copied: For the position of a reader, the equations that are copied in front of it, in
            program order. The copies stay in use until a later reader has copies of its own.
    """
    new: dict[Var, Var] = {}
    eqns = []
    for i, eqn in enumerate(program.eqns):
        for p in copied.get(i, ()):
            original = program.eqns[p]
            outvars = [Var(var.aval) for var in original.outvars]
            eqns.append(original.replace(invars=substitute(original.invars, new), outvars=outvars))
            new |= dict(zip(original.outvars, outvars, strict=True))
        eqns.append(eqn.replace(invars=substitute(eqn.invars, new)))
    return Program(program.jaxpr.replace(eqns=eqns))
