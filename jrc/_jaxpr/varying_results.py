"""Over which mesh axes the results of a program differ, inside of a `jax.shard_map`.

JAX has types for that (`check_vma=True`), and refuses a loop whose carry begins equal on all
devices and then differs, or branches of which one returns zeros. This asks of values alone.

>>> import jax, jax.numpy as jnp
>>> def run(x, y):
...     total = jax.lax.psum(x, "data")
...     return total + y, jax.lax.fori_loop(0, 3, lambda _, carry: carry + x, jnp.zeros(()))
>>> jaxpr = jax.make_jaxpr(run, axis_env=[("data", 2)])(1.0, 1.0).jaxpr
>>> [sorted(axes) for axes in varying_results(jaxpr, [Axes(["data"]), Axes()])]
[[], ['data']]
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from jrc._jaxpr.atoms import is_ref, is_variable
from jrc._jaxpr.control_flow import loop_parts
from jrc._jaxpr.equations import inner_programs, walk
from jrc._jaxpr.primitives import facts_of, primitive_name

Axes = frozenset[str]


def varying_results(jaxpr: Jaxpr, given: Sequence[Axes]) -> list[Axes]:
    """Return for each result of a program the mesh axes along which it may differ.

    Args:
        jaxpr: The program.
        given: The same of its inputs.
    """
    varying: dict[Any, Axes] = dict(zip(jaxpr.invars, given, strict=True))

    def of(atoms: Sequence[Any]) -> list[Axes]:
        return [varying.get(x, Axes()) if is_variable(x) else Axes() for x in atoms]

    for eqn in jaxpr.eqns:
        axes = of(eqn.invars)
        if refs := [x for x in eqn.invars if is_ref(x)]:
            # It may write anything that it reads into each of them.
            varying |= dict.fromkeys((*refs, *eqn.outvars), _of_opaque(eqn, axes))
        else:
            varying |= dict(zip(eqn.outvars, _of_equation(eqn, axes), strict=True))
    return of(jaxpr.outvars)


def _of_equation(eqn: JaxprEqn, given: Sequence[Axes]) -> list[Axes]:
    """The same of an equation."""
    if facts_of(eqn).makes_equal:
        in_groups = eqn.params.get("axis_index_groups") is not None
        return list(given) if in_groups else [each - _axes_of(eqn) for each in given]
    inner = inner_programs(eqn)
    match primitive_name(eqn):
        case "scan":
            return _of_scan(eqn, given)
        case "while":
            return _of_while(eqn, given)
        case "cond":
            found = [varying_results(each, given[1:]) for each in inner]
            return [given[0].union(*each) for each in zip(*found, strict=True)]
    counts = [(len(each.invars), len(each.outvars)) for each in inner]
    if facts_of(eqn).construct and counts == [(len(given), len(eqn.outvars))]:
        return varying_results(inner[0], given)  # a call
    return [_of_opaque(eqn, given)] * len(eqn.outvars)


def _of_opaque(eqn: JaxprEqn, given: Sequence[Axes]) -> Axes:
    """Along which axes anything may differ that an equation makes of what it reads."""
    inside = [each for program in inner_programs(eqn) for each, _ in walk(program)]
    return Axes().union(*given, *map(_axes_of, (eqn, *inside)))


def _of_scan(eqn: JaxprEqn, given: Sequence[Axes]) -> list[Axes]:
    (body,) = inner_programs(eqn)
    first, count = loop_parts(eqn)
    carry, found = list(given[first : first + count]), []
    while True:
        found = varying_results(body, [*given[:first], *carry, *given[first + count :]])
        new = [a | b for a, b in zip(carry, found, strict=False)]
        if new == carry:
            return [*carry, *found[count:]]
        carry = new


def _of_while(eqn: JaxprEqn, given: Sequence[Axes]) -> list[Axes]:
    condition, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
    ends = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
    asked, read, carry = given[: ends[0]], given[ends[0] : ends[1]], list(given[ends[1] :])
    while True:
        # Devices that disagree on the condition leave the loop after different steps.
        (goes_on,) = varying_results(condition, [*asked, *carry])
        found = varying_results(body, [*read, *carry])
        new = [goes_on | a | b for a, b in zip(carry, found, strict=True)]
        if new == carry:
            return list(carry)
        carry = new


def _axes_of(eqn: JaxprEqn) -> Axes:
    """The mesh axes of a collective, or of the number of a device; none of other equations."""
    if not (facts_of(eqn).is_collective or primitive_name(eqn) == "axis_index"):
        return Axes()
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return Axes(axes if isinstance(axes, tuple | list) else (axes,))
