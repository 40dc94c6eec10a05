"""Remove the computation of results that are known beforehand."""

from collections.abc import Collection, Mapping
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jrc._jaxpr.atoms import substitute
from jrc._jaxpr.dce import live_positions
from jrc._jaxpr.equations import inner_programs
from jrc._jaxpr.inline import inline_all
from jrc._jaxpr.primitives import facts_of
from jrc._jaxpr.varying_casts import casts_of, folded, is_cast, source_of
from jrc._tree import is_floating


def with_results_given(jaxpr: Jaxpr, count: int) -> Jaxpr:
    """Return the program without its first `count` results, which become its last inputs.

    Equations that read such a result read the input instead; equations that are then dead are
    dropped. Where a result is `y = max(x, 0)`, `x > 0` becomes `y > 0`.

    A result that is compared with an operand stays computed, as in the derivative of a maximum: it
    goes to the operands that equal it. Operands that were computed again, in another kernel, may
    all differ in the last bit from a maximum that was saved: then none would have a derivative.
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
    compared = _compared(jaxpr, new)
    new = {var: x for var, x in new.items() if var not in compared}
    eqns = [
        eqn.replace(invars=substitute(eqn.invars, positive if _is_above_zero(eqn, casts) else new))
        for eqn in jaxpr.eqns
    ]
    outvars = substitute(wanted, new)
    live, _ = live_positions(eqns, outvars, keep_effects=False)
    eqns = [eqns[i] for i in live]
    return jaxpr.replace(eqns=eqns, outvars=outvars, invars=[*jaxpr.invars, *inputs])


def _compared(jaxpr: Jaxpr, results: Collection[Any]) -> set[Any]:
    """The results that are compared with inputs, or with each other, by way of any computation.

    A comparison may be of a difference: a rule for `y = max(x)` may ask for `sign(x - y) == 0`.
    """
    from_results: dict[Any, frozenset[Any]] = {}
    from_inputs = set(jaxpr.invars)
    found: set[Any] = set()
    for eqn in jaxpr.eqns:
        operands = [atom for atom in eqn.invars if isinstance(atom, Var)]
        read = frozenset().union(*(from_results.get(v, ()) for v in operands))
        reads_inputs = not from_inputs.isdisjoint(operands)
        if (len(read) > 1 or (read and reads_inputs)) and _may_jump(eqn):
            found |= read
        for var in eqn.outvars:
            is_result = var in results
            from_results[var] = frozenset({var}) if is_result else read
            if reads_inputs and not is_result:
                from_inputs.add(var)
    return found


def _may_jump(eqn: JaxprEqn) -> bool:
    """Whether results may jump where operands differ in the last bit, as those of a comparison.

    A loop or a branch may compare what it reads.
    """
    jumps = facts_of(eqn).is_step or not all(is_floating(var.aval) for var in eqn.outvars)
    return jumps or bool(inner_programs(eqn))


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
