"""Plans with regions in chunks: where a budget is refused, or costs time that chunks may save.

The function with some regions in chunks is a function like any other, and is planned like it.
"""

import dataclasses
from typing import Any

from jrc._errors import named_like
from jrc.remat._chunks.rewrite import Chunks, chunks_within
from jrc.remat._planner.budget import BudgetError
from jrc.remat._planner.execute.chunked_function import chunked_function
from jrc.remat._planner.plan.plan import Plan
from jrc.remat._planner.plan.plan_candidates import Estimate
from jrc.remat._planner.program.trace import inlined_program
from jrc.remat._planner.search.choose import plan_for
from jrc.remat._planner.search.peaks import Peaks
from jrc.remat._planner.search.problem import Problem, Request
from jrc.remat._planner.settings import SETTINGS


def plan_in_chunks(
    peaks: Peaks, budget: int | float, compilations: int, measures: bool = False
) -> Plan:
    """Return the plan for a budget, with regions in chunks where that is faster or needed.

    Args:
        peaks: What is known of the options of the function as it is.
        budget: As for `plan_for`. A fraction is one of the function without chunks.
        compilations: How many programs each search may compile.
        measures: As for `plan_for`.

    Raises:
        BudgetError: If no plan fits, with chunks either.
    """
    try:
        found = plan_for(peaks, budget, compilations, measures)
    except BudgetError as error:
        return _plan_that_fits(peaks.problem, error, compilations, measures)
    if _price(peaks, found) <= SETTINGS.chunks_worth:
        return found
    for chunks in _choices(peaks.problem, found.budget, SETTINGS.chunk_shares[:1]):
        try:
            new = _planned(peaks.problem, chunks, found.budget, compilations, measures)
        except BudgetError:
            continue
        return min(found, new, key=_cost)
    return found


def _plan_that_fits(
    problem: Problem, refused: BudgetError, compilations: int, measures: bool
) -> Plan:
    for chunks in _choices(problem, refused.plan.budget, SETTINGS.chunk_shares):
        try:
            return _planned(problem, chunks, refused.plan.budget, compilations, measures)
        except BudgetError as error:
            refused = min(refused, error, key=lambda each: each.least_bytes)
    raise refused


def _choices(problem: Problem, budget: int, shares: tuple[float, ...]) -> list[list[Chunks]]:
    """For each share of what a budget leaves for temporaries, the regions wider than that."""
    found: list[list[Chunks]] = []
    if problem.parts > 1:
        return found  # slices would be cut across devices
    for share in shares:
        most_bytes = int(share * (budget - problem.own))
        if most_bytes >= SETTINGS.least_chunk:
            chunks = chunks_within(problem.function.traced.program, most_bytes, inlined_program)
            if chunks and chunks not in found:
                found.append(chunks)
    return found


def _planned(
    problem: Problem, chunks: list[Chunks], budget: int, compilations: int, measures: bool
) -> Plan:
    """The plan of the function with regions in chunks.

    Raises:
        BudgetError: If none fits; its plan is one for the function as it is, too.
    """
    request, digest = problem.request, problem.function.signature.digest
    fn = chunked_function(request.fn, chunks, request.respect_checkpoints, digest)
    peaks = Peaks(_problem_of(dataclasses.replace(request, fn=fn)))

    def whole(plan: Plan) -> Plan:
        return dataclasses.replace(
            plan,
            chunks=tuple(chunks),
            digest=digest,
            predicted=_over(plan.predicted, problem),
            verified=plan.verified and _over(plan.verified, problem),
            unplanned_flops=problem.flops,
        )

    try:
        return whole(plan_for(peaks, budget, compilations, measures))
    except BudgetError as error:
        error.plan = whole(error.plan)
        raise


def _problem_of(request: Request) -> Problem:
    """The problem of a request; of a function in a larger program, where that calls it.

    There its arguments lie on the mesh of a `shard_map`, say.
    """
    if request.program is None:
        return Problem.of(request)
    found: list[Problem] = []

    @named_like(request.fn)
    def recorded(*args: Any) -> Any:
        if not found:
            found.append(Problem.of(request))
        return request.fn(*args)

    request.program(recorded)
    return found[0]


def _over(cost: Estimate, problem: Problem) -> Estimate:
    """A cost, compared with the baseline of the function as it is."""
    ratio = cost.flops / problem.flops if problem.flops else 1.0
    return dataclasses.replace(cost, flops_ratio=ratio)


def _price(peaks: Peaks, plan: Plan) -> float:
    """How much more than the baseline a plan is predicted to cost, as a share."""
    seconds, baseline = plan.predicted.seconds, peaks.problem.baseline
    if seconds is None:
        return (plan.verified or plan.predicted).flops_ratio - 1
    known = peaks.problem.unit.seconds(peaks.predicted_cost(baseline) / peaks.problem.parts)
    return seconds / known - 1


def _cost(plan: Plan) -> float:
    cost = plan.verified or plan.predicted
    return cost.flops if cost.seconds is None else cost.seconds
