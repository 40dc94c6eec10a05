"""What the planner must not do with an equation: run it twice, or look inside of it."""

from typing import Any

from jrc._jaxpr import facts_of, has_effects, inner_programs, tag_of
from jrc.remat._gradient.custom_rules import is_custom_product
from jrc.remat._policy.resolution import KEEP_TAG
from jrc.remat._region.saved_equations import is_closed


def hides_residuals(eqn: Any) -> bool:
    """Return whether the derivative of an equation saves values of a program inside of it."""
    return facts_of(eqn).hides_residuals or is_closed(eqn) or is_custom_product(eqn)


def must_run_once(eqn: Any) -> bool:
    """Return whether an equation must not run again in the backward pass.

    It has an effect, exchanges data between devices, or is tagged by `jrc.keep_op`, at any depth.
    """
    return has_effects(eqn) or _is_saved(eqn)


def _is_saved(eqn: Any) -> bool:
    inner = (each for jaxpr in inner_programs(eqn) for each in jaxpr.eqns)
    is_saved = facts_of(eqn).is_collective or tag_of(eqn) == KEEP_TAG
    return is_saved or any(map(_is_saved, inner))
