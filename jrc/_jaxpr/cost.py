"""Bytes and floating-point operations, counted in the program itself.

XLA counts the body of a loop once; this count multiplies it by the length of the loop. A `while`
loop of unknown length counts once, a `cond` counts its most expensive branch, and dead code is not
counted. A Pallas kernel counts its author's cost estimate, or else its body for each cell of the
grid. The rule of each primitive is in `primitives`.
"""

import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from jrc._jaxpr.dce import LiveEquation, live_equations
from jrc._jaxpr.equations import branch_outside_kernels, inner_programs, repeats
from jrc._jaxpr.primitives import facts_of, primitive_name


def nbytes(aval: Any) -> int:
    """Return the bytes of an array of this type; a typed key counts its words, a token nothing."""
    itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    return math.prod(getattr(aval, "shape", ())) * itemsize


def flops(jaxpr: Jaxpr) -> int:
    """Return the floating-point operations of one run of a program, without dead code."""
    return live_flops(live_equations(jaxpr))


def live_flops(program: Sequence[LiveEquation]) -> int:
    """Return the floating-point operations of live equations."""
    return sum(_flops(node.eqn, list(map(live_flops, node.inside))) for node in program)


def equation_flops(eqn: JaxprEqn) -> int:
    """Return the floating-point operations of one equation, its inner programs included."""
    return _flops(eqn, list(map(flops, inner_programs(eqn))))


def _flops(eqn: JaxprEqn, inner: Sequence[int]) -> int:
    name = primitive_name(eqn)
    stated = eqn.params.get("cost_estimate") if name == "pallas_call" else None
    if stated is not None:
        return int(stated.flops + stated.transcendentals)
    if inner:
        branch = branch_outside_kernels(eqn)
        if name == "cond":
            return max(inner) if branch is None else inner[branch]
        return sum(inner) * repeats(eqn)
    return facts_of(eqn).flops(eqn)
