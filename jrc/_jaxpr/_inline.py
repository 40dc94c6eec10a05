"""Splicing one program into another, and opening nested `jit` calls that hold marks."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import Sharding

from jrc._jaxpr._mark import mark_of
from jrc._jaxpr._walk import inner_programs


def inline_marked(jaxpr: Jaxpr) -> Jaxpr:
    """The same program with every `jit` call that holds a mark written inline, to any depth.

    A call whose arguments or results have fixed shardings keeps them as constraints.
    """
    if not any(_opens(eqn) for eqn in jaxpr.eqns):
        return jaxpr
    renamed: dict[Var, Any] = {}
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        eqn = eqn.replace(invars=_rename(eqn.invars, renamed))
        if _opens(eqn):
            more, results = _open(eqn)
            eqns += more
            renamed.update(zip(eqn.outvars, results, strict=True))
        else:
            eqns.append(eqn)
    return jaxpr.replace(eqns=eqns, outvars=_rename(jaxpr.outvars, renamed))


def splice(jaxpr: Jaxpr, atoms: Sequence[Any]) -> tuple[list[JaxprEqn], list[Any]]:
    """The program's equations on these inputs, with fresh variables, and its results."""
    new: dict[Var, Any] = dict(zip(jaxpr.invars, atoms, strict=True))
    new |= {var: Literal(x, var.aval) for var, x in zip(jaxpr.constvars, jaxpr.consts, strict=True)}
    eqns = []
    for eqn in jaxpr.eqns:
        outvars = [var if type(var) is not Var else Var(var.aval) for var in eqn.outvars]
        eqns.append(eqn.replace(invars=_rename(eqn.invars, new), outvars=outvars))
        new.update(zip(eqn.outvars, outvars, strict=True))
    return eqns, _rename(jaxpr.outvars, new)


def _rename(atoms: Sequence[Any], new: Mapping[Var, Any]) -> list[Any]:
    return [atom if isinstance(atom, Literal) else new.get(atom, atom) for atom in atoms]


def _opens(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "jit" and _holds_mark(eqn.params["jaxpr"])


def _holds_mark(jaxpr: Jaxpr) -> bool:
    """Whether a mark stands here or in a nested `jit`; one inside a loop is not counted."""
    return any(mark_of(eqn) is not None or _opens(eqn) for eqn in jaxpr.eqns)


def _open(eqn: JaxprEqn) -> tuple[list[JaxprEqn], list[Any]]:
    (inner,) = inner_programs(eqn)
    before, inputs = _constrained(eqn.invars, eqn.params["in_shardings"])
    middle, results = splice(inline_marked(inner), inputs)
    after, outputs = _constrained(results, eqn.params["out_shardings"])
    return before + middle + after, outputs


def _constrained(
    atoms: Sequence[Any], shardings: Sequence[Any]
) -> tuple[list[JaxprEqn], list[Any]]:
    """Sharding constraints for the atoms whose sharding the call fixes."""
    eqns, results = [], []
    for atom, sharding in zip(atoms, shardings, strict=True):
        if isinstance(sharding, Sharding):
            constrain = jax.make_jaxpr(
                lambda x, sharding=sharding: jax.lax.with_sharding_constraint(x, sharding)
            )(jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype))
            more, (atom,) = splice(constrain, [atom])
            eqns += more
        results.append(atom)
    return eqns, results
