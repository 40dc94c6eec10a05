"""Functions with a derivative of their own: what their forward pass saves.

A `custom_vjp` stays as it is: it runs as one equation, outside of all regions or run again inside
of one. JAX is asked what its forward rule saves, down to which of that are its operands and
results, which others may read as well. A `custom_jvp` around products is treated alike; one around
elementwise operators is differentiated like a primitive. To run one again costs the FLOPs of the
function: where it is run again, its first run computes nothing but the results.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jrc._jaxpr import facts_of, inline_all, inner_programs, is_variable, nbytes, walk
from jrc.remat._gradient.residuals import Stacked, stacked_by_loops

CUSTOM = ("custom_vjp_call", "custom_jvp_call")
"""The primitives of functions with a derivative of their own."""


@dataclasses.dataclass(frozen=True)
class Forward:
    """The forward pass of a function with a derivative of its own.

    Attributes:
        operands: Positions of the operands that it saves.
        results: Positions of the results that it saves.
        bytes: Bytes of what it saves besides; at least 1 where it saves a result, which a region
            has to compute again even if the result is saved: the saved value is a copy of it.
        stacked: What of that steps of loops write.
    """

    operands: frozenset[int]
    results: frozenset[int]
    bytes: int
    stacked: tuple[Stacked, ...]


def is_custom_product(eqn: Any) -> bool:
    """Return whether this is a `custom_jvp` around products, whose derivative saves more."""
    if eqn.primitive.name != "custom_jvp_call":
        return False
    inside = [each for jaxpr in inner_programs(eqn) for each, _ in walk(jaxpr)]
    return any(facts_of(each).is_contraction or facts_of(each).hides_residuals for each in inside)


def forward_of(run: Callable[..., Any], avals: Sequence[Any], perturbed: Sequence[int]) -> Forward:
    """Return what the forward pass of a function saves.

    Args:
        run: The function, of arrays.
        avals: The types of its inputs.
        perturbed: The inputs that it is differentiated by.
    """
    count: list[int] = []

    def both(*inputs: Any) -> Any:
        def at(*primals: Any) -> Any:
            new = dict(zip(perturbed, primals, strict=True))
            return list(run(*(new.get(i, x) for i, x in enumerate(inputs))))

        results, vjp = jax.vjp(at, *(inputs[i] for i in perturbed))
        count[:] = [len(results)]
        return *results, *jax.tree.leaves(vjp)

    jaxpr = inline_all(jax.make_jaxpr(both)(*avals))
    results, saved = jaxpr.outvars[: count[0]], set(filter(is_variable, jaxpr.outvars[count[0] :]))
    operands = frozenset(i for i, v in enumerate(jaxpr.invars) if v in saved)
    own = frozenset(i for i, v in enumerate(results) if is_variable(v) and v in saved)
    rest = saved.difference(jaxpr.invars, jaxpr.constvars, [results[i] for i in own])
    size = sum(nbytes(v.aval) for v in rest)
    stacked = tuple(stacked_by_loops(jaxpr, rest))
    return Forward(operands, own, max(size, 1) if own else size, stacked)
