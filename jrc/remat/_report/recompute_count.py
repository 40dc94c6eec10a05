"""What a gradient runs a second time, counted operator by operator."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jrc._jaxpr import (
    LiveEquation,
    View,
    equation_flops,
    facts_of,
    is_variable,
    live_flops,
    place,
    primitive_name,
    repeats,
    trace_id,
    walk,
)
from jrc.remat._region.rerun_scope import is_rerun

# What only names or annotates a value, or stands between two runs.
_NO_WORK = (View.NAME, View.ANNOTATION)


@dataclasses.dataclass(frozen=True)
class Rerun:
    """One kind of operator that is run again.

    Attributes:
        primitive: The operator.
        count: How often it is run again, loops times their length.
        flops: Floating-point operations of all of them.
    """

    primitive: str
    count: int
    flops: int


def reruns(forward: Any, gradient: Sequence[LiveEquation]) -> tuple[Rerun, ...]:
    """What the live equations of a gradient run a second time, the dearest operators first.

    What a derivative adds (the cosine of a sine) runs once, late instead of early: only operators
    that the forward program has count.
    """
    known = [eqn for eqn, _ in walk(forward)]
    moments = {trace_id(eqn) for eqn in known}
    first = {(trace_id(eqn), *_kind(eqn)) for eqn in known}
    first |= {(place(eqn), *_kind(eqn)) for eqn in known}
    counts: dict[str, list[int]] = {}
    for node, times in _leaves(gradient, 1, False):
        # A derivative rule writes the operator anew: then the line must do.
        at = trace_id(node.eqn) if trace_id(node.eqn) in moments else place(node.eqn)
        if (at, *_kind(node.eqn)) in first and facts_of(node.eqn).view not in _NO_WORK:
            both = counts.setdefault(primitive_name(node.eqn), [0, 0])
            both[0] += times
            both[1] += times * equation_flops(node.eqn)
    found = [Rerun(name, count, flops) for name, (count, flops) in counts.items()]
    return tuple(sorted(found, key=lambda each: (-each.flops, -each.count, each.primitive)))


def _kind(eqn: Any) -> tuple[Any, ...]:
    """What an operator and its re-run have in common."""
    sizes = tuple(getattr(var.aval, "shape", ()) for var in eqn.outvars)
    constants = tuple(not is_variable(atom) for atom in eqn.invars)
    return primitive_name(eqn), sizes, constants, str(eqn.params.get("y", ""))


def _leaves(
    program: Sequence[LiveEquation], times: int, again: bool
) -> Iterator[tuple[LiveEquation, int]]:
    """The equations without programs inside that run again, with how often they do."""
    for node in program:
        here = again or is_rerun(node.eqn)
        parts = node.inside
        if primitive_name(node.eqn) == "cond":
            parts = (max(parts, key=live_flops, default=()),)
        for part in parts:
            yield from _leaves(part, times * repeats(node.eqn), here)
        if not parts and here:
            yield node, times
