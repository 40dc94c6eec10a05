"""What stays opaque under a decision: saved, or recomputed in a region."""

import dataclasses
from collections.abc import Iterable

from jrc.remat._gradient.opaque import Opaque, Path, gathered
from jrc.remat._planner.plan.decision import Decision


def opaque_under(
    decision: Decision | None, found: Iterable[tuple[Path, Opaque]]
) -> tuple[Opaque, ...]:
    """Return what is opaque, and whether a decision recomputes it, the largest first."""
    return gathered(
        dataclasses.replace(each, recomputed=_is_recomputed(decision, path)) for path, each in found
    )


def _is_recomputed(decision: Decision | None, path: Path) -> bool:
    """Whether the equation at the end of a path runs again in the backward pass."""
    for position, branch in path:
        stages = decision.stages if decision else ()
        stage = next((stage for stage in stages if position in stage.positions), None)
        if stage is None or stage.region:
            return stage is not None and position in stage.recomputed
        decision = stage.inside
        if decision and decision.parts:
            # The first part is the leanest: what it does not recompute, none does.
            decision = decision.parts[0][1]
        if decision and decision.chunks:
            return True
        if decision and decision.branches:
            decision = decision.branches[branch]
    return False
