"""Count what a gradient recomputes, operator by operator."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jrc._jaxpr import (
    LiveEquation,
    View,
    equation_flops,
    exponent_of,
    facts_of,
    inline_marked,
    inner_programs,
    is_variable,
    live_flops,
    place,
    primitive_name,
    repeats,
    trace_id,
    walk,
)
from jrc.remat._region.rerun_scope import is_rerun

# Equations that name or annotate a value, barriers included, are no work.
_NO_WORK = (View.NAME, View.ANNOTATION)


@dataclasses.dataclass(frozen=True)
class Rerun:
    """One kind of operator that is recomputed.

    Attributes:
        primitive: The operator.
        count: How often it is recomputed, loops times their length.
        flops: Floating-point operations of all of them.
    """

    primitive: str
    count: int
    flops: int


def reruns(forward: Any, gradient: Sequence[LiveEquation]) -> tuple[Rerun, ...]:
    """Return what the live equations of a gradient recompute, the most FLOPs first.

    Only operators of the forward program count. What a derivative adds (the cosine of a sine) runs
    once with and without recomputation: in the forward pass, or late.

    Args:
        forward: The function's program.
        gradient: The live equations of its value and gradient, whose outermost calls are inlined.
    """
    # Inside of its own regions a gradient has calls, and equations as JAX traced them.
    originals = [*(eqn for eqn, _ in walk(forward)), *_inlined(forward)]
    trace_ids = {trace_id(eqn) for eqn in originals}
    known = {(at, *_kind(eqn)) for eqn in originals for at in (trace_id(eqn), place(eqn))}
    counts: dict[str, list[int]] = {}
    for node, times in _leaves(gradient, 1, False):
        # A derivative rule traces the operator a second time: then the source line identifies it.
        at = trace_id(node.eqn) if trace_id(node.eqn) in trace_ids else place(node.eqn)
        if (at, *_kind(node.eqn)) in known and facts_of(node.eqn).view not in _NO_WORK:
            both = counts.setdefault(primitive_name(node.eqn), [0, 0])
            both[0] += times
            both[1] += times * equation_flops(node.eqn)
    found = [Rerun(name, count, flops) for name, (count, flops) in counts.items()]
    return tuple(sorted(found, key=lambda each: (-each.flops, -each.count, each.primitive)))


def _inlined(forward: Any) -> Iterator[Any]:
    """Yield the equations at every depth of a program, with the lines that inlined ones have."""
    for eqn in inline_marked(forward, lambda _: True).eqns:
        yield eqn
        for inner in inner_programs(eqn):
            yield from _inlined(inner)


def _kind(eqn: Any) -> tuple[Any, ...]:
    """Return what an operator and its recomputation have in common."""
    sizes = tuple(getattr(var.aval, "shape", ()) for var in eqn.outvars)
    constants = tuple(not is_variable(atom) for atom in eqn.invars)
    return primitive_name(eqn), sizes, constants, exponent_of(eqn)


def _leaves(
    program: Sequence[LiveEquation], times: int, in_rerun: bool
) -> Iterator[tuple[LiveEquation, int]]:
    """Yield the recomputed equations without programs inside, with how often each runs."""
    for node in program:
        here = in_rerun or is_rerun(node.eqn)
        parts = node.inside
        if primitive_name(node.eqn) == "cond":
            parts = (max(parts, key=live_flops, default=()),)
        for part in parts:
            yield from _leaves(part, times * repeats(node.eqn), here)
        if not parts and here:
            yield node, times
