"""What stays opaque under a decision: saved, or recomputed in a region."""

import dataclasses
from collections.abc import Iterable

from jrc.remat._gradient.opaque import Opaque, Path, gathered
from jrc.remat._planner.plan.decision import Branches, Decision, Loop, Mapped, Region, Stages


def opaque_under(decision: Decision, found: Iterable[tuple[Path, Opaque]]) -> tuple[Opaque, ...]:
    """Return what is opaque, and whether a decision recomputes it, the largest first."""
    return gathered(
        dataclasses.replace(each, recomputed=_is_recomputed(decision, path)) for path, each in found
    )


def _is_recomputed(decision: Decision, path: Path) -> bool:
    """Whether the equation at the end of a path runs again in the backward pass."""
    inner: Decision | None = decision
    for position, branch in path:
        stage = inner.stage_of(position) if isinstance(inner, Stages) else None
        match stage:
            case Region():
                return position in stage.recomputed
            case Loop():
                # The first part is the leanest: what it does not recompute, none does.
                if stage.parts[0].segments:
                    return True
                inner = stage.parts[0].body
            case Branches():
                inner = stage.branches[branch]
            case Mapped():
                inner = stage.body
            case _:
                return False
    return False
