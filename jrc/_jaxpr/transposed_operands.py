"""Products of transposed operands, as products of what is transposed.

The logits of a model with tied embeddings are often written `h @ E.T`. In a loop over chunks the
transposed matrix is a second copy of the embeddings, which XLA makes in front of the loop. A
product that contracts the other axis needs none, and its gradient lies as the embeddings do.

>>> import jax, jax.numpy as jnp
>>> program = Program(jax.make_jaxpr(lambda h, E: h @ E.T)(jnp.ones((2, 3)), jnp.ones((5, 3))))
>>> program.eqns[-1].params["dimension_numbers"]
(((1,), (0,)), ((), ()))
>>> (product,) = [eqn for eqn in with_operands_as_they_lie(program).eqns if len(eqn.invars) == 2]
>>> product.params["dimension_numbers"]
(((1,), (1,)), ((), ()))
"""

from typing import Any

from jax.extend.core import JaxprEqn

from jrc._jaxpr.atoms import is_variable
from jrc._jaxpr.axes import dimension_numbers, operand_axes
from jrc._jaxpr.primitives import primitive_name
from jrc._jaxpr.program import INPUT, Program


def with_operands_as_they_lie(program: Program) -> Program:
    """Return the program in which products read what their operands are transposed from.

    Where free axes would come in another order the operand stays, and where both operands would be
    one value: slices of `x @ x.T` read a slice of one and all of the other. A transposition that
    nothing else reads is dead then. Equations keep their places.
    """
    eqns = [_as_they_lie(program, eqn) for eqn in program.eqns]
    if all(new is old for new, old in zip(eqns, program.eqns, strict=True)):
        return program
    return Program(program.jaxpr.replace(eqns=eqns))


def _as_they_lie(program: Program, eqn: JaxprEqn) -> JaxprEqn:
    if primitive_name(eqn) != "dot_general":
        return eqn
    for operand in (0, 1):
        while (transposed := _transposition(program, eqn.invars[operand])) is not None:
            permutation = transposed.params["permutation"]
            free = [permutation[axis] for axis in operand_axes(eqn, operand).free]
            if free != sorted(free) or transposed.invars[0] in eqn.invars:
                break
            numbers: list[list[Any]] = list(map(list, dimension_numbers(eqn)))
            for each in numbers:
                each[operand] = tuple(permutation[axis] for axis in each[operand])
            invars = list(eqn.invars)
            invars[operand] = transposed.invars[0]
            params = eqn.params | {"dimension_numbers": tuple(map(tuple, numbers))}
            eqn = eqn.replace(invars=invars, params=params)
    return eqn


def _transposition(program: Program, x: Any) -> JaxprEqn | None:
    """The equation that transposes another value into this one, if one does."""
    p = program.producer[x] if is_variable(x) else INPUT
    is_transposed = p != INPUT and primitive_name(program.eqns[p]) == "transpose"
    return program.eqns[p] if is_transposed else None
