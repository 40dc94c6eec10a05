"""Splicing one program into another, and opening nested `jit` calls that hold marks."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AxisType, Sharding

from jrc._jaxpr.equations import inner_programs
from jrc._jaxpr.mark import mark_of
from jrc._jaxpr.op_tag import tag_of
from jrc._jaxpr.substitute import substitute


def inline_marked(jaxpr: Jaxpr, and_where: Callable[[JaxprEqn], bool] = lambda _: False) -> Jaxpr:
    """The same program with every `jit` call that holds a mark written inline, to any depth.

    So are other calls of which `and_where` is true; tagged ones stay closed. A call whose
    arguments or results have fixed shardings keeps them as constraints.
    """

    def opens(eqn: JaxprEqn) -> bool:
        return _is_jit(eqn) and tag_of(eqn) is None and (_holds_mark_in_jit(eqn) or and_where(eqn))

    return _inline(jaxpr, opens)


def inline_all(jaxpr: Jaxpr) -> Jaxpr:
    """The same program without `jit` calls; what was inside has the call's place and scope."""
    return _inline(jaxpr, _is_jit, keep_source=False)


def _inline(jaxpr: Jaxpr, opens: Callable[[JaxprEqn], bool], keep_source: bool = True) -> Jaxpr:
    if not any(opens(eqn) for eqn in jaxpr.eqns):
        return jaxpr
    renamed: dict[Var, Any] = {}
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        eqn = eqn.replace(invars=substitute(eqn.invars, renamed))
        if opens(eqn):
            (inner,) = inner_programs(eqn)
            more, results = _open(eqn, _inline(inner, opens, keep_source))
            eqns += [each.replace(source_info=_source(eqn, each, keep_source)) for each in more]
            renamed.update(zip(eqn.outvars, results, strict=True))
        else:
            eqns.append(eqn)
    return jaxpr.replace(eqns=eqns, outvars=substitute(jaxpr.outvars, renamed))


def _source(call: JaxprEqn, inner: JaxprEqn, keep_source: bool) -> Any:
    """The line and scope of what was inside a call: its own within those of the call."""
    if not keep_source:
        return call.source_info
    outside, inside = call.source_info.name_stack, inner.source_info.name_stack
    return inner.source_info.replace(name_stack=outside + inside)


def splice(jaxpr: Jaxpr, atoms: Sequence[Any]) -> tuple[list[JaxprEqn], list[Any]]:
    """The program's equations on these inputs, with fresh variables, and its results."""
    new: dict[Var, Any] = dict(zip(jaxpr.invars, atoms, strict=True))
    new |= {var: Literal(x, var.aval) for var, x in zip(jaxpr.constvars, jaxpr.consts, strict=True)}
    eqns = []
    for eqn in jaxpr.eqns:
        outvars = [var if type(var) is not Var else Var(var.aval) for var in eqn.outvars]
        eqns.append(eqn.replace(invars=substitute(eqn.invars, new), outvars=outvars))
        new.update(zip(eqn.outvars, outvars, strict=True))
    return eqns, substitute(jaxpr.outvars, new)


def _is_jit(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "jit"


def _holds_mark_in_jit(eqn: JaxprEqn) -> bool:
    """Whether this is a `jit` call with a mark in it or in a nested one; a loop's do not count."""
    if not _is_jit(eqn) or tag_of(eqn) is not None:
        return False
    inner = eqn.params["jaxpr"].eqns
    return any(mark_of(each) is not None or _holds_mark_in_jit(each) for each in inner)


def _open(eqn: JaxprEqn, inner: Jaxpr) -> tuple[list[JaxprEqn], list[Any]]:
    before, inputs = _constrained(eqn.invars, eqn.params["in_shardings"])
    middle, results = splice(inner, inputs)
    after, outputs = _constrained(results, eqn.params["out_shardings"])
    return before + middle + after, outputs


def _constrained(
    atoms: Sequence[Any], shardings: Sequence[Any]
) -> tuple[list[JaxprEqn], list[Any]]:
    """Sharding constraints for the atoms whose sharding the call fixes."""
    eqns, results = [], []
    for atom, sharding in zip(atoms, shardings, strict=True):
        # With explicit axes the type of the value carries its sharding already.
        mesh = getattr(sharding, "mesh", None)
        explicit = mesh is not None and AxisType.Explicit in mesh.axis_types
        if isinstance(sharding, Sharding) and not explicit:
            constrain = jax.make_jaxpr(
                lambda x, sharding=sharding: jax.lax.with_sharding_constraint(x, sharding)
            )(jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype))
            more, (atom,) = splice(constrain, [atom])
            eqns += more
        results.append(atom)
    return eqns, results
