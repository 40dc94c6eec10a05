"""The program of one part of a value, where a mesh axis is split into parts outside of it.

>>> import jax, jax.numpy as jnp
>>> mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
>>> over_data = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
>>> fn = lambda x: jax.lax.with_sharding_constraint(jnp.tanh(x), over_data)
>>> program = Program(jax.make_jaxpr(fn)(jnp.ones(4)))
>>> part = without_mesh_axes(program, ["data"])
>>> [eqn.params["sharding"].spec for eqn in part.eqns if eqn.primitive.name != "tanh"]
[P(None,)]
"""

from collections.abc import Iterable
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.sharding import NamedSharding

from jrc._jaxpr.atoms import is_variable
from jrc._jaxpr.program import Program
from jrc._specs import axes_of, without_axes


def without_mesh_axes(program: Program, names: Iterable[str]) -> Program:
    """Return the program with shardings, of types and constraints, that do not name these axes.

    Equations and the order of inputs and results are as before.

    Args:
        program: The program.
        names: The mesh axes.
    """
    left_out = frozenset(names)
    return Program(_without(program.jaxpr, left_out)) if left_out else program


def same_values(part: Program, program: Program) -> dict[Any, Any]:
    """Return which value of a program each value of it without mesh axes is."""
    pairs = [
        (part.jaxpr.constvars, program.jaxpr.constvars),
        (part.jaxpr.invars, program.jaxpr.invars),
        *((a.outvars, b.outvars) for a, b in zip(part.eqns, program.eqns, strict=True)),
    ]
    return {v: w for a, b in pairs for v, w in zip(a, b, strict=True)}


def _without(jaxpr: Jaxpr, names: frozenset[str]) -> Jaxpr:
    new: dict[Any, Any] = {}

    def renewed(atoms: Iterable[Any]) -> list[Any]:
        for x in atoms:
            if is_variable(x) and x not in new:
                new[x] = Var(_type_without(x.aval, names))
        return [new[x] if is_variable(x) else x for x in atoms]

    constvars, invars = renewed(jaxpr.constvars), renewed(jaxpr.invars)
    eqns = [_equation(eqn, renewed(eqn.invars), renewed(eqn.outvars), names) for eqn in jaxpr.eqns]
    outvars = renewed(jaxpr.outvars)
    return jaxpr.replace(
        constvars=constvars, consts=jaxpr.consts, invars=invars, outvars=outvars, eqns=eqns
    )


def _equation(
    eqn: JaxprEqn, invars: list[Any], outvars: list[Any], names: frozenset[str]
) -> JaxprEqn:
    params = {key: _without_in(value, names) for key, value in eqn.params.items()}
    return eqn.replace(invars=invars, outvars=outvars, params=params)


def _without_in(value: Any, names: frozenset[str]) -> Any:
    """A parameter of an equation."""
    if isinstance(value, Jaxpr):
        return _without(value, names)
    if isinstance(value, NamedSharding):
        return NamedSharding(value.mesh, without_axes(value.spec, names))
    if isinstance(value, tuple) and any(isinstance(x, (Jaxpr, NamedSharding)) for x in value):
        return tuple(_without_in(x, names) for x in value)
    return value


def _type_without(aval: Any, names: frozenset[str]) -> Any:
    sharding = getattr(aval, "sharding", None)
    if not isinstance(sharding, NamedSharding) or names.isdisjoint(axes_of(sharding.spec)):
        return aval
    spec = without_axes(sharding.spec, names)
    return aval.update(sharding=NamedSharding(sharding.mesh, spec))
