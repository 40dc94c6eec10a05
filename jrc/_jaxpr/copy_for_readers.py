"""Copies of equations for some of their readers.

>>> import jax, jax.numpy as jnp
>>> program = Program(jax.make_jaxpr(lambda x: (lambda y: (y + x, y * x))(jnp.sin(x)))(1.0))
>>> [eqn.primitive.name for eqn in copy_for_readers(program, [(2, [0], 2)]).eqns]
['sin', 'add', 'sin', 'mul']
"""

from collections.abc import Iterable, Sequence

from jax.extend.core import Var

from jrc._jaxpr.atoms import substitute
from jrc._jaxpr.program import Program

CopyForReader = tuple[int, Sequence[int], int]
"""The position of a reader, equations that make what it reads, and the reader whose copies it
reads: where that is itself they are copied in front of it, in program order."""


def copy_for_readers(program: Program, copied: Iterable[CopyForReader]) -> Program:
    """Return the program in which some equations read copies.

    Args:
        program: The program.
        copied: What readers read instead of the original. It stays in use until a later reader has
            copies of its own, or those of another.
    """
    at: dict[int, list[CopyForReader]] = {}
    for each in copied:
        at.setdefault(each[0], []).append(each)
    again = {like for each in at.values() for reader, _, like in each if like != reader}
    new: dict[Var, Var] = {}
    read: dict[int, dict[Var, Var]] = {}
    eqns = []
    for i, eqn in enumerate(program.eqns):
        for _, chain, like in at.get(i, ()):
            for p in chain:
                original = program.eqns[p]
                outvars = original.outvars
                if like == i:
                    outvars = [Var(var.aval) for var in outvars]
                    invars = substitute(original.invars, new)
                    eqns.append(original.replace(invars=invars, outvars=outvars))
                else:
                    outvars = [read[like].get(var, var) for var in outvars]
                new |= dict(zip(original.outvars, outvars, strict=True))
        if i in again:
            read[i] = dict(new)
        eqns.append(eqn.replace(invars=substitute(eqn.invars, new)))
    return Program(program.jaxpr.replace(eqns=eqns))
