"""Casts inside `jax.shard_map`, which change only the mesh axes that a type varies over.

Before a value that is equal on all devices is combined with one that varies over a mesh axis, JAX
casts it to a varying one. A scalar literal is then converted to its dtype after the cast, and not
at trace time as it is elsewhere.

>>> import jax, jax.numpy as jnp
>>> mesh = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
>>> spec = jax.sharding.PartitionSpec("x")
>>> double = jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=spec, out_specs=spec)
>>> (eqn,) = jax.make_jaxpr(double)(jnp.ones(2)).eqns
>>> (*casts, product) = folded(eqn.params["jaxpr"]).eqns
>>> all(map(is_cast, casts)), float(source_of(product.invars[1], casts_of(casts)).val)
(True, 2.0)
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jrc._jaxpr.atoms import substitute
from jrc._jaxpr.primitives import facts_of


def is_cast(eqn: JaxprEqn) -> bool:
    """Return whether an equation only casts its operand to vary over a mesh axis."""
    return facts_of(eqn).is_cast


def casts_of(eqns: Iterable[JaxprEqn]) -> dict[Any, JaxprEqn]:
    """Return the casts among equations, by the variables that they make."""
    return {eqn.outvars[0]: eqn for eqn in eqns if is_cast(eqn)}


def source_of(atom: Any, casts: Mapping[Any, JaxprEqn]) -> Any:
    """Return an atom as it was before all casts."""
    while not isinstance(atom, Literal) and atom in casts:
        atom = casts[atom].invars[0]
    return atom


def folded(jaxpr: Jaxpr) -> Jaxpr:
    """Return the program with scalar literals converted to the dtype that it converts them to."""
    casts, numbers, eqns = casts_of(jaxpr.eqns), {}, []
    for eqn in jaxpr.eqns:
        eqn = eqn.replace(invars=substitute(eqn.invars, numbers))
        number = _converted(eqn, casts)
        if number is None:
            eqns.append(eqn)
        elif isinstance(eqn.invars[0], Literal):
            numbers[eqn.outvars[0]] = number
        else:
            # The cast of the converted number replaces the conversion of the cast one.
            cast = casts[eqn.invars[0]]
            eqns.append(cast.replace(invars=[number], outvars=eqn.outvars))
    return jaxpr.replace(eqns=eqns, outvars=substitute(jaxpr.outvars, numbers))


def _converted(eqn: JaxprEqn, casts: Mapping[Any, JaxprEqn]) -> Literal | None:
    """Return the literal that an equation converts a literal to, if it does only that."""
    if eqn.primitive.name != "convert_element_type" or eqn.params["weak_type"]:
        return None
    number, dtype = source_of(eqn.invars[0], casts), eqn.params["new_dtype"]
    value = np.asarray(number.val) if isinstance(number, Literal) else None
    if value is None or value.shape:
        return None
    if jnp.issubdtype(value.dtype, jnp.inexact) and not jnp.issubdtype(dtype, jnp.inexact):
        return None
    value = value.astype(dtype)
    return Literal(value, jax.typeof(value))
