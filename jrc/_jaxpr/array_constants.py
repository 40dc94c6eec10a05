"""Arrays that a program reads as literals become its constants: variables, which may be cut.

A function that is called closes over them. Where the call is written inline, they are literals.

>>> import jax, jax.numpy as jnp, numpy as np
>>> from jrc._jaxpr.inline import inline_all
>>> masked = jax.jit(lambda x: x * np.arange(3.0))
>>> jaxpr = inline_all(jax.make_jaxpr(masked)(jnp.ones(3)))
>>> len(jaxpr.constvars), len(with_array_constants(jaxpr).constvars)
(0, 1)
"""

from typing import Any

from jax.extend.core import Jaxpr, Var

from jrc._jaxpr.atoms import is_variable, shape_of


def with_array_constants(jaxpr: Jaxpr) -> Jaxpr:
    """Return the program with the arrays that its equations read as constants, each once.

    Numbers stay literals, and so do arrays in the programs of loops, branches and calls.
    """
    found: dict[int, tuple[Var, Any]] = {}

    def variable(x: Any) -> Var:
        return found.setdefault(id(x.val), (Var(x.aval), x.val))[0]

    def is_array(x: Any) -> bool:
        return not is_variable(x) and shape_of(x) != ()

    eqns = [
        eqn.replace(invars=[variable(x) if is_array(x) else x for x in eqn.invars])
        if any(map(is_array, eqn.invars))
        else eqn
        for eqn in jaxpr.eqns
    ]
    if not found:
        return jaxpr
    more, values = zip(*found.values(), strict=True)
    return jaxpr.replace(
        constvars=[*jaxpr.constvars, *more], consts=[*jaxpr.consts, *values], eqns=eqns
    )
