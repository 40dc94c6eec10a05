"""The function under the `jax.checkpoint` regions that its user wrote, as an option."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jrc._jaxpr import (
    can_rebuild,
    evaluate,
    facts_of,
    inner_programs,
    primitive_name,
    program_key,
    repeats,
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

    Its cost is counted in its gradient program, with what loops stack, also in regions that run
    again. Its peak is what JAX saves and, beside that, the residuals of the largest region, which
    are there while it is recomputed.

    Args:
        written: The program with its regions; its first result is the loss.
        perturbed: Positions of the inputs that it is differentiated by.
        unit: What costs are counted in.
        baseline: The cost of the operations in the gradient program of the baseline.
    """
    avals = [v.aval for v in written.invars]
    saved, gradient = residuals_and_gradient(evaluate(written), avals, perturbed)
    inside = _in_regions(written, unit)
    cost = max(unit.total(gradient) - baseline, 0) + unit.of_stacked(saved.stacked) + inside.cost
    peak = saved.bytes + inside.bytes
    return Option(peak, saved.bytes, cost, AsWritten, NAME, family="policy")


@dataclasses.dataclass(frozen=True)
class _InRegions:
    """What recomputed regions save: the most bytes at one time, and what all loops stack."""

    bytes: int = 0
    cost: int = 0


def _in_regions(jaxpr: Any, unit: CostUnit) -> _InRegions:
    # Equal layers are asked about once.
    kinds: dict[Any, list[Any]] = {}
    for eqn in jaxpr.eqns:
        key = primitive_name(eqn), *map(program_key, inner_programs(eqn))
        kinds.setdefault(key, []).append(eqn)
    found = [(_in_region(alike[0], unit), len(alike)) for alike in kinds.values()]
    most = max((each.bytes for each, _ in found), default=0)
    return _InRegions(most, sum(each.cost * count for each, count in found))


def _in_region(eqn: Any, unit: CostUnit) -> _InRegions:
    if facts_of(eqn).is_region:
        (body,) = inner_programs(eqn)
        avals = [v.aval for v in body.invars]
        floating = [i for i, aval in enumerate(avals) if is_floating(aval)]
        saved, inside = residuals_of(evaluate(body), avals, floating), _in_regions(body, unit)
        return _InRegions(saved.bytes + inside.bytes, unit.of_stacked(saved.stacked) + inside.cost)
    # The mesh axes of a `shard_map` have no names here.
    if not can_rebuild(eqn) or primitive_name(eqn) == "shard_map":
        return _InRegions()
    found = [_in_regions(each, unit) for each in inner_programs(eqn)]
    most = max((each.bytes for each in found), default=0)
    return _InRegions(most, repeats(eqn) * sum(each.cost for each in found))
