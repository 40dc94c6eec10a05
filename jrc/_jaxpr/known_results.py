"""Remove the computation of results that are known beforehand."""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jrc._jaxpr.atoms import substitute
from jrc._jaxpr.dce import live_positions
from jrc._jaxpr.inline import inline_all
from jrc._jaxpr.primitives import Reads, facts_of
from jrc._jaxpr.varying_casts import casts_of, folded, is_cast, source_of


def with_results_given(jaxpr: Jaxpr, count: int) -> Jaxpr:
    """Return the program without its first `count` results, which become its last inputs.

    Equations that read such a result read the input instead; equations that are then dead are
    dropped. Where a result is `y = max(x, 0)`, `x > 0` becomes `y > 0`.

    A result that is compared for equality stays computed. The derivative of a maximum goes to the
    operands that equal it. Operands that were computed again, in another kernel, may all differ in
    the last bit from a maximum that was saved: then no operand would have a derivative.
    """
    jaxpr = folded(jaxpr)
    given, wanted = jaxpr.outvars[:count], jaxpr.outvars[count:]
    casts = casts_of(jaxpr.eqns)
    made = {var for eqn in jaxpr.eqns for var in eqn.outvars}
    inputs = [Var(atom.aval) for atom in given]
    new = {
        var: x for var, x in zip(given, inputs, strict=True) if isinstance(var, Var) and var in made
    }
    positive = {
        eqn.invars[0]: new[eqn.outvars[0]]
        for eqn in jaxpr.eqns
        if is_relu(eqn) and eqn.outvars[0] in new and isinstance(eqn.invars[0], Var)
    }
    compared = _compared(jaxpr.eqns)
    new = {var: x for var, x in new.items() if var not in compared}
    eqns = [
        eqn.replace(invars=substitute(eqn.invars, positive if _is_above_zero(eqn, casts) else new))
        for eqn in jaxpr.eqns
    ]
    outvars = substitute(wanted, new)
    live, _ = live_positions(eqns, outvars, keep_effects=False)
    eqns = [eqns[i] for i in live]
    return jaxpr.replace(eqns=eqns, outvars=outvars, invars=[*jaxpr.invars, *inputs])


def _compared(eqns: Sequence[JaxprEqn]) -> set[Any]:
    """The variables whose entries are compared for equality, and those that these are copied from.

    A derivative of `x.at[i].max(y)` compares entries that it gathers from the result.
    """
    found: set[Any] = set()
    for eqn in reversed(eqns):
        moves = facts_of(eqn).derivative_reads is Reads.NOTHING or eqn.primitive.name == "gather"
        if eqn.primitive.name == "eq" or (moves and not found.isdisjoint(eqn.outvars)):
            found.update(atom for atom in eqn.invars if isinstance(atom, Var))
    return found


def is_relu(eqn: JaxprEqn) -> bool:
    """Return whether this is max(x, 0) with a custom derivative, as `jax.nn.relu` is."""
    if eqn.primitive.name != "custom_jvp_call" or len(eqn.invars) != 1:
        return False
    inner = folded(inline_all(eqn.params["call_jaxpr"]))
    casts = casts_of(inner.eqns)
    (only, *more) = [each for each in inner.eqns if not is_cast(each)] or [eqn]
    if more or only.primitive.name != "max":
        return False
    return only.invars[0] is inner.invars[0] and _is_zero(only.invars[1], casts)


def _is_above_zero(eqn: JaxprEqn, casts: Mapping[Any, JaxprEqn]) -> bool:
    return eqn.primitive.name == "gt" and _is_zero(eqn.invars[1], casts)


def _is_zero(atom: Any, casts: Mapping[Any, JaxprEqn]) -> bool:
    atom = source_of(atom, casts)
    return isinstance(atom, Literal) and not getattr(atom.val, "shape", ()) and bool(atom.val == 0)
