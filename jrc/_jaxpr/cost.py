"""Bytes and floating-point operations, counted in the program itself, and sums of any other cost.

XLA counts the body of a loop once; this count multiplies it by the length of the loop. A `while`
loop of unknown length counts once, a `cond` counts its most expensive branch, and dead code is not
counted. A Pallas kernel counts its author's cost estimate, or else its body for each cell of the
grid. The rule of each primitive is in `primitives`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from jrc._jaxpr.atoms import is_variable
from jrc._jaxpr.control_flow import loop_parts
from jrc._jaxpr.dce import LiveEquation, live_equations
from jrc._jaxpr.equations import branch_outside_kernels, inner_programs, repeats
from jrc._jaxpr.primitives import facts_of, primitive_name


def nbytes(aval: Any) -> int:
    """Return the bytes of an array of this type; a typed key counts its words, a token nothing."""
    itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    return math.prod(getattr(aval, "shape", ())) * itemsize


Rule = Callable[[JaxprEqn], int]
"""The cost of an equation without programs inside."""


def flops(jaxpr: Jaxpr) -> int:
    """Return the floating-point operations of one run of a program, without dead code."""
    return live_flops(live_equations(jaxpr))


def live_flops(program: Sequence[LiveEquation]) -> int:
    """Return the floating-point operations of live equations."""
    return live_cost(program, own_flops)


def equation_flops(eqn: JaxprEqn) -> int:
    """Return the floating-point operations of one equation, its inner programs included."""
    return equation_cost(eqn, own_flops)


def live_cost(program: Sequence[LiveEquation], rule: Rule, in_loops: Rule | None = None) -> int:
    """Return the sum of a cost over live equations.

    Args:
        program: The equations.
        rule: The cost of an equation.
        in_loops: The same inside of loops, if it is another one there.
    """
    return sum(_cost(node.eqn, node.inside, rule, in_loops) for node in program)


def equation_cost(eqn: JaxprEqn, rule: Rule, in_loops: Rule | None = None) -> int:
    """Return the cost of one equation, its inner programs included; see `live_cost`."""
    return _cost(eqn, [live_equations(each) for each in inner_programs(eqn)], rule, in_loops)


def sums_in_carries(
    program: Sequence[LiveEquation], times: int = 1
) -> Iterator[tuple[JaxprEqn, int]]:
    """Yield the additions to carries of loops, each with how often it runs.

    Such are, above all, sums of gradients: of what all steps read, and of weights over chunks.
    """
    for node in program:
        eqn, count = node.eqn, times * repeats(node.eqn)
        for each in node.inside:
            yield from sums_in_carries(each, count)
        if primitive_name(eqn) != "scan":
            continue
        (body,), (constants, carried) = inner_programs(eqn), loop_parts(eqn)
        given = body.invars[constants : constants + carried]
        pairs = zip(body.outvars[:carried], given, strict=True)
        carries = {made: carry for made, carry in pairs if is_variable(made)}
        for each in (inner.eqn for inner in node.inside[0]):
            carry = carries.get(each.outvars[0]) if each.outvars else None
            if primitive_name(each) in ("add", "add_any") and carry in each.invars:
                yield each, count


def own_flops(eqn: JaxprEqn) -> int:
    """Return the floating-point operations of an equation: the rule of `flops`."""
    stated = stated_cost(eqn)
    if stated is not None:
        return int(stated.flops + stated.transcendentals)
    return facts_of(eqn).flops(eqn)


def stated_cost(eqn: JaxprEqn) -> Any:
    """Return what the author of a Pallas kernel states that it costs; `None` if nothing is."""
    return eqn.params.get("cost_estimate") if primitive_name(eqn) == "pallas_call" else None


def _cost(
    eqn: JaxprEqn, inside: Sequence[Sequence[LiveEquation]], rule: Rule, in_loops: Rule | None
) -> int:
    if stated_cost(eqn) is not None or not inside:
        return rule(eqn)
    if in_loops is not None and primitive_name(eqn) in ("scan", "while"):
        rule = in_loops
    inner = [live_cost(each, rule, in_loops) for each in inside]
    if primitive_name(eqn) == "cond":
        branch = branch_outside_kernels(eqn)
        return max(inner) if branch is None else inner[branch]
    return sum(inner) * repeats(eqn)
