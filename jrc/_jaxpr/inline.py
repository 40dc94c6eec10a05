"""Inline programs into others: nested `jit` calls that contain marks, or all of them.

A `cond` that has one branch outside of Pallas kernels counts as a call of that branch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AxisType, Sharding

from jrc._jaxpr.atoms import substitute
from jrc._jaxpr.equations import branch_outside_kernels
from jrc._jaxpr.mark import mark_of
from jrc._jaxpr.op_tag import tag_of
from jrc._jaxpr.source_info import UNKNOWN, place


def inline_marked(jaxpr: Jaxpr, and_where: Callable[[JaxprEqn], bool] = lambda _: False) -> Jaxpr:
    """Return the program with every `jit` call inlined that contains a mark, at any depth.

    Other calls are inlined if `and_where` is true of them, tagged calls never. Fixed shardings of
    a call's arguments or results become sharding constraints.
    """

    def is_inlined(eqn: JaxprEqn) -> bool:
        return _is_call(eqn) and tag_of(eqn) is None and (_has_mark(eqn) or and_where(eqn))

    return _inline(jaxpr, is_inlined)


def inline_all(jaxpr: Jaxpr) -> Jaxpr:
    """Return the program without `jit` calls; inlined equations have the call's source line."""
    return _inline(jaxpr, _is_call, keep_source=False)


def _inline(
    jaxpr: Jaxpr, is_inlined: Callable[[JaxprEqn], bool], keep_source: bool = True
) -> Jaxpr:
    if not any(is_inlined(eqn) for eqn in jaxpr.eqns):
        return jaxpr
    renamed: dict[Var, Any] = {}
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        eqn = eqn.replace(invars=substitute(eqn.invars, renamed))
        if is_inlined(eqn):
            inner = _inline(_called(eqn), is_inlined, keep_source)
            more, results = _inline_call(eqn, inner)
            eqns += [
                each.replace(
                    source_info=source_inside(eqn, each) if keep_source else eqn.source_info
                )
                for each in more
            ]
            renamed.update(zip(eqn.outvars, results, strict=True))
        else:
            eqns.append(eqn)
    return jaxpr.replace(eqns=eqns, outvars=substitute(jaxpr.outvars, renamed))


def source_inside(call: JaxprEqn, inner: JaxprEqn) -> Any:
    """Return the source line and name scope of an inlined equation, inside those of the call.

    What JAX traced for several calls at once (`jnp.where`) has no line: then it is the call's.
    """
    source = call.source_info if place(inner) == UNKNOWN else inner.source_info
    outside, inside = call.source_info.name_stack, inner.source_info.name_stack
    return source.replace(name_stack=outside + inside)


def splice(jaxpr: Jaxpr, atoms: Sequence[Any]) -> tuple[list[JaxprEqn], list[Any]]:
    """Return the program's equations on these inputs, with fresh variables, and its results."""
    new: dict[Var, Any] = dict(zip(jaxpr.invars, atoms, strict=True))
    new |= {var: Literal(x, var.aval) for var, x in zip(jaxpr.constvars, jaxpr.consts, strict=True)}
    eqns = []
    for eqn in jaxpr.eqns:
        outvars = [var if type(var) is not Var else Var(var.aval) for var in eqn.outvars]
        eqns.append(eqn.replace(invars=substitute(eqn.invars, new), outvars=outvars))
        new.update(zip(eqn.outvars, outvars, strict=True))
    return eqns, substitute(jaxpr.outvars, new)


def _is_call(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "jit" or branch_outside_kernels(eqn) is not None


def _called(eqn: JaxprEqn) -> Jaxpr:
    """The program that a call runs."""
    branch = branch_outside_kernels(eqn)
    return eqn.params["jaxpr"] if branch is None else eqn.params["branches"][branch]


def _has_mark(eqn: JaxprEqn) -> bool:
    """Return whether a call or a nested one has a mark; marks in loops do not count."""
    if not _is_call(eqn) or tag_of(eqn) is not None:
        return False
    inner = _called(eqn).eqns
    return any(mark_of(each) is not None or _has_mark(each) for each in inner)


def _inline_call(eqn: JaxprEqn, inner: Jaxpr) -> tuple[list[JaxprEqn], list[Any]]:
    """Return the equations and results of a call, with its shardings as constraints."""
    if eqn.primitive.name == "cond":
        return splice(inner, eqn.invars[1:])
    before, inputs = _constrained(eqn.invars, eqn.params["in_shardings"])
    middle, results = splice(inner, inputs)
    after, outputs = _constrained(results, eqn.params["out_shardings"])
    return before + middle + after, outputs


def _constrained(
    atoms: Sequence[Any], shardings: Sequence[Any]
) -> tuple[list[JaxprEqn], list[Any]]:
    """Return constraint equations for atoms with a fixed sharding, and the atoms they make."""
    eqns, results = [], []
    for atom, sharding in zip(atoms, shardings, strict=True):
        # With explicit axes the sharding is part of the value's type.
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
