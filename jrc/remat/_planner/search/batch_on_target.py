"""The search for the largest batch where a compilation may take a minute.

The model of the target says where to begin: the first batch that is compiled is one that is
predicted to fit barely. There the candidates that may be the leanest are compiled, and the one that
needs least is followed to larger or smaller batches. Nothing is compiled if arguments, results and
gradients of the smallest batch alone exceed the budget.
"""

import functools
from collections.abc import Callable

from jrc.remat._planner.make_plan import Compiler, plan_of_process_0
from jrc.remat._planner.plan.plan import Plan
from jrc.remat._planner.search.candidate_peaks import Peaks
from jrc.remat._planner.search.largest_within import largest_within, predicted_start
from jrc.remat._planner.search.problem import PlanningProblem
from jrc.remat._planner.search.search import choose, leanest_to_compile
from jrc.remat._planner.search.search_by_prediction import cheapest_fitting
from jrc.remat._planner.settings import SETTINGS

_WHO = "jrc.largest_batch"


class BatchOnTarget:
    """Batches of a function and their peaks on a target; equal programs are compiled once.

    Args:
        problem_of: From a batch the planning problem of the function.
        plain_peak: From a batch the peak with nothing recomputed, compiled.
        limit: The budget in bytes.
        step: Batches are multiples of this.
        end: The largest batch, a multiple of `step`.
        logged: Logs a batch, what was compiled for it, and its peak, which it returns.
    """

    def __init__(
        self,
        problem_of: Callable[[int], PlanningProblem],
        plain_peak: Callable[[int], int],
        limit: int,
        step: int,
        end: int,
        logged: Callable[[int, str, int], int],
    ) -> None:
        self.plain_peak, self.limit, self.step, self.end = plain_peak, limit, step, end
        self.logged = logged
        self.problem = functools.cache(problem_of)
        self.compiler = functools.cache(lambda batch: Compiler(self.problem(batch)))
        self.leanest: str | int | None = None

    def plain(self) -> int:
        """Return the largest batch with nothing recomputed; 0 if none fits."""
        return self._largest(lambda problem: len(problem.candidates) - 1, self.plain_peak, 0)

    def recomputed(self, plain: int) -> int:
        """Return the largest batch that a plan fits.

        Args:
            plain: A batch that fits without one.
        """
        return self._largest(self._place, self._least_peak, plain)

    def plan(self, batch: int, plain: int) -> Plan:
        """Return a plan that fits a batch, the cheapest of a few that are compiled.

        Args:
            batch: What `recomputed` returned.
            plain: What `plain` returned; that batch needs no recomputation.
        """
        return plan_of_process_0(lambda: self._plan(batch, plain), _WHO)

    def _largest(
        self, pick: Callable[[PlanningProblem], int], peak: Callable[[int], int], least: int
    ) -> int:
        """Return the largest batch of a candidate, first asked where its prediction fits barely."""
        if least == self.end:
            return least

        def predicted(batch: int) -> int:
            problem = self.problem(batch)
            candidate = problem.all[pick(problem)]
            return problem.predicted(candidate, [candidate]).peak_bytes

        given = self.limit, self.step, self.end
        start = predicted_start(self._own_bytes, predicted, *given, least)
        return 0 if start is None else largest_within(peak, *given, start)

    def _own_bytes(self, batch: int) -> int:
        """Return the bytes of arguments, results and gradients."""
        problem = self.problem(batch)
        return problem.given + problem.returned

    def _least_peak(self, batch: int) -> int:
        problem, compiled = self.problem(batch), self.compiler(batch)
        tried = (self._place(problem),)
        if self.leanest is None:
            first, *others = leanest_to_compile(problem, SETTINGS.leanest_on_target)
            most = SETTINGS.compiled_margin * problem.follow(problem.all[first])
            tried = (first, *(i for i in others if problem.follow(problem.all[i]) <= most))
        peaks = {i: compiled(problem.all[i]).peak for i in tried}
        leanest = min(peaks, key=lambda i: peaks[i])
        self.leanest = problem.all[leanest].name or leanest
        return self.logged(batch, "the leanest plan", peaks[leanest])

    def _place(self, problem: PlanningProblem) -> int:
        """Return the number of the candidate that is taken for the leanest.

        Once some were compiled, it is the leanest of these: by its name, or a candidate without one
        by its place in the row, which may be another plan at another batch.
        """
        if isinstance(self.leanest, int):
            return min(self.leanest, len(problem.candidates) - 1)
        named = [i for i, each in enumerate(problem.all) if each.name == self.leanest]
        return named[0] if self.leanest and named else leanest_to_compile(problem)[0]

    def _plan(self, batch: int, plain: int) -> Plan:
        problem, compiled = self.problem(batch), self.compiler(batch)
        if batch == plain:
            whole = len(problem.candidates) - 1
            memory = {whole: compiled(problem.all[whole])}
            return problem.plan_of(problem.all[whole], self.limit, memory)
        best, peaks = self._place(problem), Peaks(problem, compiled, _WHO)
        if peaks.of(best) > self.limit:
            return choose(problem, self.limit, compiled, _WHO)
        cheapest = cheapest_fitting(peaks, self.limit, best, problem.compilations - 1)
        chosen = problem.all[best if cheapest is None else cheapest]
        return problem.plan_of(chosen, self.limit, peaks.memory)
