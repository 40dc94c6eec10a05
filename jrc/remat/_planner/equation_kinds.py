"""Kinds of equations: what XLA fuses, what has an inside, what must not be run twice."""

from typing import Any

from jrc._jaxpr import Fusion, facts_of, has_effects, inner_programs, tag_of
from jrc.remat._policy.resolution import KEEP_TAG
from jrc.remat._region.saved_equations import is_closed


def is_construct(eqn: Any) -> bool:
    """Whether the derivative of an equation keeps things of its inside that have no name."""
    return facts_of(eqn).hides_residuals or is_closed(eqn)


def is_heavy(eqn: Any) -> bool:
    """Whether XLA keeps an operator apart from what stands next to it, as it does a product."""
    return facts_of(eqn).fusion is Fusion.NONE


def is_fused(eqn: Any) -> bool:
    """Whether XLA makes what an operator returns inside of whatever reads it."""
    return facts_of(eqn).fusion is Fusion.INSIDE


def runs_once(eqn: Any) -> bool:
    """Whether an equation must not be run twice.

    What acts inside is among its own effects, but for what never leaves it: a kernel that writes
    its results.
    """
    return has_effects(eqn) or _sends(eqn)


def _sends(eqn: Any) -> bool:
    """Whether replicas talk in it, or a tag keeps it, at any depth."""
    inner = (each for jaxpr in inner_programs(eqn) for each in jaxpr.eqns)
    sends = facts_of(eqn).is_collective or tag_of(eqn) == KEEP_TAG
    return sends or any(map(_sends, inner))
