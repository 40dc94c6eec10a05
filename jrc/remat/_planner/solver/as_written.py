"""The function under the `jax.checkpoint` regions that its user wrote, as an option."""

from collections.abc import Sequence
from typing import Any

from jrc._jaxpr import (
    can_rebuild,
    evaluate,
    facts_of,
    inner_programs,
    primitive_name,
    program_key,
)
from jrc._tree import is_floating
from jrc.remat._gradient.residuals import residuals_and_gradient, residuals_of
from jrc.remat._planner.costs.cost_unit import CostUnit
from jrc.remat._planner.plan.decision import AsWritten
from jrc.remat._planner.solver.option import Option

NAME = "your jax.checkpoint as written"


def as_written_option(
    written: Any, perturbed: Sequence[int], unit: CostUnit, baseline: int
) -> Option:
    """Return the option that leaves every region where its user put it.

    Its cost is counted in its gradient program. Its peak is what JAX saves and, beside that, the
    residuals of the largest region, which are there while it is recomputed.

    Args:
        written: The program with its regions; its first result is the loss.
        perturbed: Positions of the inputs that it is differentiated by.
        unit: What costs are counted in.
        baseline: The cost of the operations in the gradient program of the baseline.
    """
    avals = [v.aval for v in written.invars]
    saved, gradient = residuals_and_gradient(evaluate(written), avals, perturbed)
    cost = max(unit.total(gradient) - baseline, 0) + unit.of_stacked(saved.stacked)
    peak = saved.bytes + _most_inside(written)
    return Option(peak, saved.bytes, cost, AsWritten, NAME, family="policy")


def _most_inside(jaxpr: Any) -> int:
    """The most bytes that are recomputed at one time, in the largest region of a program."""
    # Equal layers are asked about once.
    kinds = {
        (primitive_name(eqn), *map(program_key, inner_programs(eqn))): eqn for eqn in jaxpr.eqns
    }
    return max(map(_inside, kinds.values()), default=0)


def _inside(eqn: Any) -> int:
    if facts_of(eqn).is_region:
        (body,) = inner_programs(eqn)
        avals = [v.aval for v in body.invars]
        floating = [i for i, aval in enumerate(avals) if is_floating(aval)]
        return residuals_of(evaluate(body), avals, floating).bytes + _most_inside(body)
    # The mesh axes of a `shard_map` have no names here.
    is_entered = can_rebuild(eqn) and primitive_name(eqn) != "shard_map"
    return max(map(_most_inside, inner_programs(eqn)), default=0) if is_entered else 0
