"""The plan for a budget: the option that the search finds, or the error that none fits."""

from collections.abc import Sequence

from jrc._text import exact_memory_text, memory_text
from jrc.remat._planner.budget import Budget, BudgetError, Share
from jrc.remat._planner.costs.cost_unit import TimeUnit
from jrc.remat._planner.plan.decision import AsWritten, Stages
from jrc.remat._planner.plan.opaque_in_plan import opaque_under
from jrc.remat._planner.plan.plan import Plan
from jrc.remat._planner.plan.plan_candidates import Estimate, PlanCandidate
from jrc.remat._planner.plan.policy_by_names import by_name
from jrc.remat._planner.plan.saved_by_plan import Kept, change_text, saved_by
from jrc.remat._planner.search.chunks import Wanted
from jrc.remat._planner.search.compiled_cost import CompiledCost
from jrc.remat._planner.search.peaks import Peaks
from jrc.remat._planner.search.problem import Problem
from jrc.remat._planner.search.search import Search
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._planner.solver.option import Option
from jrc.remat._time.seconds import Seconds


def plan_for(
    peaks: Peaks,
    budget: Budget,
    compilations: int,
    measures: bool = False,
    chunks: bool = False,
) -> Plan:
    """Return the plan of the cheapest option that fits, of those that the search looks at.

    Regions in chunks are looked for where no other plan fits, or where the cheapest that is
    expected to fit costs time that chunks may save: for recomputation, or for memory that is new.
    Whether they save it only compiled programs tell.

    Args:
        peaks: What is known of the options of a problem.
        budget: Bytes, a fraction between the least peak and that of the baseline, or a share of
            the latter.
        compilations: How many programs may be compiled; with 0 predictions decide.
        measures: Whether the fastest that fit are run.
        chunks: Whether regions may run in chunks.

    Raises:
        BudgetError: If none fits.
    """
    problem = peaks.problem
    search = Search(problem.options, peaks, compilations)
    limit = bytes_of(budget, search, problem.baseline)
    found = search.expected_fitting(limit)
    chunks = chunks and (compilations > 0 or found is None)
    if not (chunks and _is_dear(problem, found)):
        found = search.cheapest_fitting(limit)
    if chunks and _is_dear(problem, found):
        temporaries = search.temporaries_within(limit) + problem.on_chip
        search.add(options_in_chunks(peaks, Wanted(temporaries, is_urgent=found is None)))
        if search.compiled:
            search.allow_more(compilations if found is None else SETTINGS.compiled_in_chunks)
        found = search.cheapest_fitting(limit)
        if found is None:
            found = _in_leaner_chunks(search, peaks, limit)
    if found is None:
        leanest = _leanest_in_chunks(peaks) if chunks else []
        found = fitting_option(search, limit, problem.baseline, leanest)
    if found is None:
        raise _budget_error(search, peaks, limit)
    if measures:
        found = _fastest(search.fitting(limit), peaks)
    return plan_of(search, peaks, found, limit)


def _never_fits(problem: Problem, limit: int) -> bool:
    """Whether arguments and gradients exceed a budget, whatever is recomputed.

    In a larger program arguments may be donated, and XLA may split gradients over devices.
    """
    return problem.request.program is None and problem.parts == 1 and limit < problem.own


def _is_dear(problem: Problem, option: Option | None) -> bool:
    """Whether an option, the best so far, costs much more than the operations of the baseline."""
    if option is None:
        return True
    return problem.predicted_cost(option) > (1 + SETTINGS.chunks_worth) * problem.cost


def _in_leaner_chunks(search: Search, peaks: Peaks, limit: int) -> Option | None:
    """Return the cheapest option that fits, of those with chunks for a smaller budget.

    What chunks need is predicted too low at times. Then those for a budget fit that is smaller by
    as much as the least so far, which is compiled for it, is too large.
    """
    if search.temporaries_within(limit) > 0 and search.compilations:
        search.least(limit, most=1)
    available = search.temporaries_within(limit)
    if available <= 0:
        return None
    least = min(map(search.expected, search.options)) - (limit - available)
    share = SETTINGS.leaner_chunks * min(available / max(least, 1), 1.0)
    temporaries = int(share * available) + peaks.problem.on_chip
    if not search.add(options_in_chunks(peaks, Wanted(temporaries, leanest=True))):
        return None
    if search.compilations:
        search.allow_more(SETTINGS.compiled_in_chunks)
    return search.cheapest_fitting(limit)


def _leanest_in_chunks(peaks: Peaks) -> list[Option]:
    """Return options with chunks of which one may be the leanest: the same for every budget.

    Fewer bytes a chunk are not always leaner, and none may be small enough for all regions.
    """
    temporaries = min(map(peaks.predicted, peaks.problem.options)) - peaks.own
    looks = (Wanted(int(share * temporaries), leanest=True) for share in SETTINGS.leanest_shares)
    return [option for wanted in looks for option in options_in_chunks(peaks, wanted)]


def options_in_chunks(peaks: Peaks, wanted: Wanted) -> list[Option]:
    """Return the options with regions in chunks that promise most for a budget.

    Args:
        peaks: What is known of the function.
        wanted: What is looked for.
    """
    return [option for each in peaks.in_chunks.found(wanted) for option in each.options]


def _fastest(options: Sequence[Option], peaks: Peaks) -> Option:
    """Run the first different programs of some options, and return the option of the fastest.

    The baseline is taken where others gain too little.
    """
    different = {peaks.program(each): each for each in reversed(options)}
    chosen = [each for each in options if each in different.values()][: SETTINGS.measured]
    seconds = peaks.measured(chosen)
    favour = 1 - SETTINGS.least_time_gain
    return min(chosen, key=lambda each: seconds[each] * (favour if each.is_baseline else 1))


def bytes_of(budget: Budget, search: Search, baseline: Option) -> int:
    """Return a budget in bytes.

    Both ends of a fraction below 1 are compiled, and the search may compile some more between them.
    A share is one of the function as it is, where its own `jax.checkpoint` regions need less than
    the baseline, which has none.
    Where the compiler fails for the baseline its predicted peak counts.

    Args:
        budget: As for `plan_for`.
        search: The search for this budget.
        baseline: The option that recomputes nothing.
    """
    if isinstance(budget, int):
        return budget
    whole = _peak(search, baseline)
    if isinstance(budget, Share):
        as_written = (x for x in search.options if isinstance(x.decision, AsWritten))
        return int(budget.of_baseline * min([whole, *(_peak(search, x) for x in as_written)]))
    if budget == 1:
        return whole
    if not search.compilations:
        ends = sorted((search.expected(search.least()), whole))
    else:
        most = SETTINGS.leanest_compiled
        if budget == 0:
            most = max(search.compilations - 1, 1)
        ends = sorted((search.compile(search.least(most=most)), whole))
        # Where costs are known inexactly a search for one budget would compile all it may.
        own = 0 if search.peaks.are_costs_exact else search.compilations - 1
        search.allow_more(max(SETTINGS.compiled_between, own))
    return int(ends[0] + budget * (ends[1] - ends[0]))


def _peak(search: Search, option: Option) -> int:
    """The compiled peak of an option; the expected one where nothing may be, or was, compiled."""
    found = search.attempt(option) if search.compilations else None
    return search.expected(option) if found is None else found


def fitting_option(
    search: Search, budget: int, baseline: Option, more: Sequence[Option] = ()
) -> Option | None:
    """Return the cheapest option that the search finds within a budget.

    Before it gives up it compiles the baseline, of which XLA may recompute much of its own accord,
    and a few that may be the leanest. If one of these fits, others may, which are cheaper. They are
    the same for every budget: no budget is refused that the least of another one fits.

    Args:
        search: The search for this budget.
        budget: Bytes.
        baseline: The option that recomputes nothing.
        more: Options with chunks, of which the leanest may be one.
    """
    found = search.cheapest_fitting(budget)
    if found is not None:
        return found
    whole = [each for each in search.options if not each.chunks]
    search.add(more)
    if not search.compilations:
        return search.expected_fitting(budget)
    last = Search([*whole, *more], search.peaks, search.asked)
    last.failed.update(search.failed)
    last.attempt(baseline)
    for each in whole:
        if isinstance(each.decision, AsWritten) and last.best(budget) is None:
            last.attempt(each)  # what its user runs is refused by no prediction
    if last.best(budget) is None:
        last.least(budget, most=max(SETTINGS.compiled_before_refusal, search.asked))
    if last.best(budget) is not None:
        last.allow_more(SETTINGS.compiled_in_chunks)
        last.cheapest_fitting(budget)
    search.take_in(last)
    return search.best(budget)


def plan_of(search: Search, peaks: Peaks, option: Option, budget: int) -> Plan:
    """Return an option as a plan.

    Args:
        search: The search that found it.
        peaks: What is known of the peaks.
        option: The option.
        budget: Bytes.
    """
    whole, problem = peaks.problem, peaks.problem_of(option)
    function = problem.function
    program = function.traced.program
    decision, opaque = option.whole, opaque_under(option.whole, problem.opaque)
    return Plan(
        budget=budget,
        predicted=_predicted(peaks, search, option),
        verified=_verified(peaks, search, option),
        unplanned_flops=whole.flops,
        baseline_recomputed=problem.recomputed,
        saved_bytes=option.saved,
        compilations=peaks.programs(search.compiled),
        kept=saved_by(program, decision) if isinstance(decision, Stages) else (),
        candidates=_candidates(search, peaks, option),
        decision=decision,
        signature=function.signature,
        opaque=opaque,
        by_name=by_name(program, decision, function.traced.opened, opaque, problem.graphs),
        target=problem.request.target,
        minimize="time" if isinstance(problem.unit, TimeUnit) else "flops",
        chunks=option.chunks,
        whole=whole.function.signature if option.chunks else None,
    )


def _candidates(search: Search, peaks: Peaks, chosen: Option) -> tuple[PlanCandidate, ...]:
    """Every option with as many chunks, with its cost, and what changes from the one before it.

    Where something runs in chunks the baseline, without them, is the last.
    """
    problem, found = peaks.problem_of(chosen), []
    before: Sequence[Kept] | None = None
    without = (peaks.problem.baseline,) if chosen.chunks else ()
    for option in (*problem.options, *without):
        decision = option.decision
        saved = None
        if isinstance(decision, Stages):
            saved = saved_by(problem.function.traced.program, decision)
        if option in problem.manual:
            before = None
        cost = peaks.compiled(option) if option in search.compiled else None
        found.append(
            PlanCandidate(
                predicted=_predicted(peaks, search, option),
                verified=_verified(peaks, search, option),
                sent_bytes=None if cost is None else cost.sent,
                rerun_sent_bytes=None if cost is None else cost.rerun_sent,
                saved_bytes=option.saved,
                change=option.name if saved is None else change_text(before, saved),
                is_chosen=option is chosen,
                name=option.name,
            )
        )
        before = saved
    return tuple(found)


def _predicted(peaks: Peaks, search: Search, option: Option) -> Estimate:
    """The cost of an option as it was expected before it was compiled."""
    problem = peaks.problem_of(option)
    known = search.expected(option), search.expected_cost(option)
    peak, cost = search.before.get(option, known)
    time = None
    if isinstance(problem.unit, TimeUnit):
        time = Seconds(problem.unit.seconds(cost / problem.parts), "modelled")
    return _estimate(peaks.problem, peak, problem.flops_of(option), option.host, time)


def _verified(peaks: Peaks, search: Search, option: Option) -> Estimate | None:
    """The cost of an option that was compiled."""
    if option not in search.compiled:
        return None
    cost, total = peaks.compiled(option), peaks.flops(option)
    return _estimate(peaks.problem, cost.peak, total, cost.host, peaks.time(option))


def _estimate(
    problem: Problem, peak: int, total: int, host: int, time: Seconds | None = None
) -> Estimate:
    ratio = total / problem.flops if problem.flops else 1.0
    seconds, source = (time.value, time.source) if time else (None, "")
    return Estimate(peak, total, ratio, host, seconds, source)


def _budget_error(search: Search, peaks: Peaks, limit: int) -> BudgetError:
    """The error that says the least peak that the search found."""
    problem, least = peaks.problem, min(search.compiled or search.options, key=search.expected)
    plan = plan_of(search, peaks, least, limit)
    cost = peaks.compiled(least) if search.compiled else None
    return BudgetError(_refusal(problem, plan, cost), search.expected(least), plan)


def _refusal(problem: Problem, plan: Plan, cost: CompiledCost | None) -> str:
    alone = problem.request.program is None
    what = "the gradient of" if alone else "the whole step around"
    peak = (plan.verified or plan.predicted).peak_bytes
    found = "found" if plan.verified else "predicted"
    given, returned = problem.given, problem.returned
    temporaries = max(peak - given - returned, 0)
    less = ""
    if cost is not None and cost.outputs:  # none where the compiler stated the peak alone
        given, returned, temporaries = cost.arguments, cost.outputs, cost.temporaries
        less = f", less {memory_text(cost.aliased)} that results reuse" if cost.aliased else ""
    most = f", with {problem.widest} in chunks" if plan.chunks else ""
    if temporaries and not plan.chunks:
        most = f", pinned most by {problem.widest}"
    finds = ": jrc.largest_batch finds how small" if alone else ""
    way_out = f"Raise the budget, or make the batch smaller{finds}"
    if _never_fits(problem, plan.budget):
        way_out = (
            "No plan makes arguments and gradients smaller: raise the budget, shard them, or use a "
            "smaller dtype"
        )
    return (
        f"the least peak that was {found} of {what} `{problem.name}` is "
        f"{exact_memory_text(peak)}; the budget is {exact_memory_text(plan.budget)}. Of the least, "
        f"arguments are {memory_text(given)}, results and gradients {memory_text(returned)}, "
        f"temporaries {memory_text(temporaries)}{less}{most}. {way_out}."
    )
