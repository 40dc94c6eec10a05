"""The search: which candidate fits a budget, found by compiling a few of them.

The search compiles the same candidates in the same order for every budget until their answers
differ. So a larger budget never leads to more predicted FLOPs, even where XLA's bytes do not
follow the prediction. Where few compilations are allowed, predictions choose what is compiled
(`search_by_prediction`), and this promise does not hold.
"""

import dataclasses
import math
from collections.abc import Callable

from jrc._errors import name_of
from jrc._text import exact_memory_text, memory_text
from jrc.remat._planner.budget import BudgetError
from jrc.remat._planner.plan.plan import Plan
from jrc.remat._planner.search.candidate_peaks import Peaks
from jrc.remat._planner.search.candidates import Candidate
from jrc.remat._planner.search.compiled_cost import CompiledCost
from jrc.remat._planner.search.problem import PlanningProblem
from jrc.remat._planner.search.search_by_prediction import cheapest_fitting
from jrc.remat._planner.settings import SETTINGS


def choose(
    problem: PlanningProblem,
    budget: int | float,
    compiled: Callable[[Candidate], CompiledCost] | None,
    who: str,
) -> Plan:
    """Return the plan of the candidate that fits.

    Args:
        problem: The function and its candidates.
        budget: Bytes, or a fraction between the least peak and that with nothing recomputed.
        compiled: Compiles a candidate; `None` where the prediction decides.
        who: The public function, for errors and log lines.

    Raises:
        BudgetError: If no candidate fits.
    """
    is_led = compiled is not None and problem.is_led_by_predictions
    ends = (SETTINGS.leanest_on_target + 1) * (is_led and isinstance(budget, float))
    peaks = Peaks(problem, compiled, who, (problem.most or 0) + ends)
    top = len(problem.candidates) - 1
    fits_plain = False
    if isinstance(budget, float):
        least, most = sorted(
            (least_peak(problem, peaks.of, is_compiled=bool(compiled)), peaks.of(top))
        )
        budget = int(least + budget * (most - least))
        # Both ends are compiled; one in between that needs more than the top must not hide it.
        fits_plain = peaks.of(top) <= budget
    elif compiled and problem.predicted(problem.candidates[top]).peak_bytes <= budget:
        fits_plain = peaks.of(top) <= budget
    if fits_plain:
        found = top
    elif is_led:
        found = _by_prediction(peaks, int(budget))
    else:
        found = _by_bisection(peaks, budget)
    leanest = min(peaks.memory or range(len(problem.all)), key=peaks.of)
    chosen = leanest if found is None else found
    candidate = problem.all[chosen]
    plan = peaks.problem.plan_of(candidate, budget, peaks.memory)
    if found is None:
        text = _refusal(problem, plan, peaks.memory.get(leanest), who)
        raise BudgetError(text, peaks.of(leanest), plan)
    return plan


def _by_prediction(peaks: Peaks, budget: int) -> int | None:
    """The cheapest candidate that fits, of a few that predictions choose; `None` if none does."""
    problem = peaks.problem
    fitting = (i for i in peaks.memory if peaks.of(i) <= budget)
    found = min(fitting, key=problem.cost_order, default=None)
    found = cheapest_fitting(peaks, budget, found, problem.compilations)
    if found is None and (found := _before_refusal(peaks, budget)) is not None:
        # Its peak corrects the predictions: cheaper ones may be expected to fit now.
        left = max(problem.compilations - len(peaks.memory), 0)
        found = cheapest_fitting(peaks, budget, found, left)
    return found


def _by_bisection(peaks: Peaks, budget: int | float) -> int | None:
    """The last candidate of the row that fits, or a cheaper way by hand; `None` if none does."""
    problem, count = peaks.problem, len(peaks.problem.candidates)
    more = math.ceil(math.log2(count + 1)) < problem.compilations
    found = highest_fitting(
        lambda i: peaks.of(i) <= budget,
        count,
        problem.plain_first,
        more and not problem.plain_first,
    )
    if found is None:
        found = _before_refusal(peaks, budget)
    return _cheaper_by_hand(problem, peaks, budget, found)


def _before_refusal(peaks: Peaks, budget: int | float) -> int | None:
    """The first of both ends that fits, the lean one first; of predictions all are asked."""
    problem, top = peaks.problem, len(peaks.problem.candidates) - 1
    lean = leanest_to_compile(problem) if peaks.compiled else range(len(problem.all))
    last = (*sorted(lean, key=problem.cost_order), top)
    return next((i for i in last if peaks.of(i) <= budget), None)


def calibrated(
    problem: PlanningProblem, compiled: Callable[[Candidate], CompiledCost], who: str
) -> PlanningProblem:
    """Return the problem of a split program with lines through a few candidates, compiled for them.

    For a plan that is not verified; `choose` calibrates by what it compiles. As many are compiled
    as a search may compile.

    Args:
        problem: The function and its candidates.
        compiled: Compiles a candidate.
        who: The public function, for log lines.
    """
    top = len(problem.candidates) - 1
    places = (top, 0, max(top - 1, 0), (top + 1) // 2, (top + 1) // 4)
    some = list(dict.fromkeys(places))[: problem.compilations]
    peaks = Peaks(problem, compiled, who, len(some))
    for i in some:
        peaks.of(i)
    return dataclasses.replace(peaks.problem, calibrated_by=len(peaks.memory))


def least_peak(
    problem: PlanningProblem,
    peak_of: Callable[[int], int],
    enough: float = 0,
    is_compiled: bool = True,
) -> int:
    """Return the least peak in bytes of those candidates that may be the leanest.

    Args:
        problem: The function and its candidates.
        peak_of: The peak in bytes of a candidate, by number in `problem.all`.
        enough: Bytes; no further candidate is tried once one needs at most this.
        is_compiled: Whether `peak_of` compiles a candidate, and does not predict.
    """
    least: float = math.inf
    is_followed = is_compiled and not problem.is_split
    margin = SETTINGS.compiled_margin if is_followed else SETTINGS.leanest_margin
    for i in leanest_to_compile(problem) if is_compiled else problem.leanest:
        candidate = problem.all[i]
        known = (candidate,) if is_followed else ()
        if least <= enough or problem.predicted(candidate, known).peak_bytes > margin * least:
            break
        least = min(least, peak_of(i))
    return int(least)


def leanest_to_compile(problem: PlanningProblem, few: int | None = None) -> list[int]:
    """Return those that may need least, the least peak first, each by its own gradient program.

    A program is traced sooner than it is compiled: all ways by hand are that may be meant. Of a
    program on several devices the model alone knows an order.

    Args:
        problem: The planning problem.
        few: How many, where the number of compilations is bounded; by default one of a program on
            several devices. Without a bound a few more are returned.
    """
    if problem.is_split and problem.most is None:
        return list(problem.leanest)
    every = problem.all
    limit = SETTINGS.followed_margin * min(each.temporaries for each in every)
    by_hand = range(len(problem.candidates), len(every))
    some = {*problem.leanest, *(i for i in by_hand if every[i].temporaries <= limit)}
    problem.follow_all(every[i] for i in some)
    # Those that are equal in all of these are one program, or nearly.
    order = {
        (problem.followed[every[i]], every[i].saved, every[i].cost): i
        for i in sorted(some, reverse=True)
    }
    few = few or (1 if problem.is_split else SETTINGS.leanest_on_target)
    asked = len(problem.leanest) if problem.most is None else few
    return [i for _, i in sorted(order.items())[:asked]]


def _cheaper_by_hand(
    problem: PlanningProblem, peaks: Peaks, budget: int | float, found: int | None
) -> int | None:
    """The way by hand of fewest FLOPs that fits, if it has fewer than what was found.

    Compiled are the first few that fit by the model, then those that nearly do; where nothing else
    fits, only these.
    """
    count, every = len(problem.candidates), problem.all
    most, limits = math.inf, [SETTINGS.by_hand_margin * budget]
    if found is not None:
        most, limits = every[found].cost, [budget, SETTINGS.cheaper_margin * budget]
    compilations = SETTINGS.cheaper_compiled
    if problem.most is not None:
        compilations = min(compilations, max(problem.most - len(peaks.memory), 0))
    ways = sorted(range(count, len(every)), key=problem.cost_order)
    if peaks.compiled and not problem.is_split:
        far = SETTINGS.followed_margin * budget
        problem.follow_all(
            every[i] for i in ways if every[i].cost < most and peaks.expected(i) <= far
        )
    tried: set[tuple[int, int]] = set()
    for limit in limits:
        for i in (i for i in ways if every[i].cost < most):
            if i not in peaks.memory:
                # Ways of equal cost and peak are one program, or nearly.
                alike = (every[i].cost, peaks.expected(i))
                if alike[1] > limit or alike in tried or not compilations:
                    continue
                tried.add(alike)
                compilations -= 1
            if peaks.of(i) <= budget:
                found, most = i, every[i].cost
                break
    return found


def highest_fitting(
    fits: Callable[[int], bool], count: int, from_the_top: bool = False, more: bool = False
) -> int | None:
    """Return the highest of `count` candidates that fits, by bisection; `None` if none does.

    Which is asked next depends on answers alone.

    Args:
        fits: Whether a candidate fits.
        count: How many candidates there are.
        from_the_top: Whether the last is asked first.
        more: Whether one more is asked at the end: that above the one which did not fit. A larger
            budget knows the answer there.
    """
    low, high = -1, count
    if from_the_top:
        if fits(count - 1):
            return count - 1
        high = count - 1
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    if more and high + 1 < count and fits(high + 1):
        low = high + 1
    return None if low < 0 else low


def _refusal(problem: PlanningProblem, plan: Plan, memory: CompiledCost | None, who: str) -> str:
    what = "the gradient of" if who == "jrc.plan" else "the whole step around"
    peak = (plan.verified or plan.predicted).peak_bytes
    given, returned = problem.given, problem.returned
    temporaries = max(peak - given - returned, 0)
    if memory is not None and memory.outputs:  # none where the compiler stated the peak alone
        given, returned, temporaries = memory.arguments, memory.outputs, memory.temporaries
    return (
        f"{who}: the peak of {what} `{name_of(problem.fn)}` is at least "
        f"{exact_memory_text(peak)}; the budget is {exact_memory_text(plan.budget)}. Of the least, "
        f"arguments are {memory_text(given)}, results and gradients {memory_text(returned)}, "
        f"temporaries {memory_text(temporaries)}, pinned most by {problem.widest}. Raise the "
        "budget, or make the batch smaller: jrc.largest_batch finds how small."
    )
