"""Equations with effects inside a segment: they run once, outside of the recomputed regions.

`jax.checkpoint` refuses most effects: writes to a `jax.Ref`, `io_callback`. Such an equation must
not run a second time either.
"""

from collections.abc import Sequence
from typing import Any

from jrc._jaxpr import Program

# The effects that `jax.checkpoint` accepts. Naming a mesh axis is no effect at all.
_ACCEPTED = {"NamedAxisEffect", "DebugEffect", "OrderedDebugEffect"}


def must_run_once(eqn: Any) -> bool:
    """Return whether an equation has an effect that a recomputed region cannot have."""
    return any(type(effect).__name__ not in _ACCEPTED for effect in eqn.effects)


def split_at_effects(
    program: Program, positions: Sequence[int]
) -> list[tuple[tuple[int, ...], bool]]:
    """Return the equations in as few parts as possible, and whether each has such effects.

    Equations with effects stay in program order; the others follow what they read.
    """
    part_of: dict[int, int] = {}
    last = 0
    for p in positions:
        made = (program.producer[var] for var in program.reads(p))
        part = max((part_of[q] for q in made if q in part_of), default=0)
        if must_run_once(program.eqns[p]):
            part_of[p] = last = max(part, last) | 1
        else:
            part_of[p] = part + part % 2
    return [
        (tuple(p for p in positions if part_of[p] == part), part % 2 == 1)
        for part in sorted(set(part_of.values()))
    ]
