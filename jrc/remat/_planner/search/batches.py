"""The batches that fit a budget, with and without recomputation.

The planner's model says where to begin: the first batch that is compiled is one that is predicted
to fit barely. There the options that may be the leanest are compiled, and the one that needs least
is followed to larger or smaller batches. Nothing is compiled if arguments, results and gradients of
the smallest batch alone exceed the budget.
"""

import logging
from collections.abc import Callable

from jrc._errors import running_name
from jrc._text import memory_text
from jrc.remat._planner.plan.plan import Plan
from jrc.remat._planner.search.choose import options_in_chunks, plan_of
from jrc.remat._planner.search.chunks import Wanted
from jrc.remat._planner.search.largest_within import largest_within, predicted_start
from jrc.remat._planner.search.peaks import Peaks
from jrc.remat._planner.search.problem import Problem
from jrc.remat._planner.search.search import Search
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._planner.solver.option import Option

_logger = logging.getLogger("jrc")


class Batches:
    """The batches of a function and their peaks; equal programs of a batch are compiled once.

    Args:
        problem_of: From a batch the planning problem of the function.
        limit: The budget in bytes.
        step: Batches are multiples of this.
        end: The largest batch, a multiple of `step`.
        compilations: How many programs the search for the cheapest plan may compile.
        chunks: Whether regions may run in chunks. The whole loss may in the plan for the batch that
            is found, but not where it is looked for: any batch would fit.
    """

    def __init__(
        self,
        problem_of: Callable[[int], Problem],
        limit: int,
        step: int,
        end: int,
        compilations: int,
        chunks: bool,
    ) -> None:
        self._problem_of = problem_of
        self._peaks: dict[int, Peaks] = {}
        self.limit, self.step, self.end = limit, step, end
        self.compilations, self.chunks = compilations, chunks
        self._leanest: str | int | None = None

    def peaks(self, batch: int) -> Peaks:
        """Return what is known of the options of a batch."""
        if batch not in self._peaks:
            self._peaks[batch] = Peaks(self._problem_of(batch))
        return self._peaks[batch]

    def fastest(self) -> tuple[int, float, bool] | None:
        """Return the batch of most examples a second, of the programs that were compiled and fit.

        Returns:
            The batch, how many a second, and whether its program recomputes anything; `None` where
            no seconds are known.
        """
        rates = [
            (batch / cost.time.value, batch, not option.is_baseline)
            for batch, peaks in self._peaks.items()
            for option, cost in peaks.known()
            if cost.time and cost.time.value and cost.peak <= self.limit
        ]
        if not rates:
            return None
        rate, batch, recomputes = max(rates)
        return batch, rate, recomputes

    def least_bytes(self) -> int:
        """Return the least bytes that are known of the smallest batch: compiled, or its arrays."""
        peaks = self.peaks(self.step)
        return min((cost.peak for _, cost in peaks.known()), default=peaks.own)

    def without(self) -> int:
        """Return the largest batch of the baseline; 0 if none fits."""
        return self._largest(lambda peaks: peaks.problem.baseline, self._baseline_peak, 0)

    def recomputed(self, without: int) -> int:
        """Return the largest batch that a plan fits.

        Args:
            without: A batch that fits without one.
        """
        whole = self._largest(self._lean_option, self._least_peak, without)
        step = max(whole, self.step)
        if not self.chunks or whole == self.end or self._lean_in_chunks(self.peaks(step)) is None:
            return whole
        return self._largest(self._lean_in_chunks_or_not, self._least_peak_in_chunks, whole)

    def plan(self, batch: int, without: int) -> Plan:
        """Return the plan for a batch that fits, the cheapest of a few that are compiled.

        Args:
            batch: What `recomputed` returned.
            without: What `without` returned: that batch needs no recomputation.
        """
        peaks = self.peaks(batch)
        problem = peaks.problem
        search = Search(problem.options, peaks, self.compilations)
        if self.chunks and batch > without:
            search.add(self._in_chunks(peaks))
            search.add(self._in_chunks(peaks, whole_loss=True))
            search.allow_more(SETTINGS.compiled_in_chunks)
        lean = problem.baseline if batch == without else self._lean_in_chunks_or_not(peaks)
        fitting = (option for option, cost in peaks.known() if cost.peak <= self.limit)
        lean = next(fitting, lean)
        search.compile(lean)
        found = search.cheapest_fitting(self.limit) or lean
        search.compile(found)
        return plan_of(search, peaks, found, self.limit)

    def _largest(
        self, pick: Callable[[Peaks], Option], peak: Callable[[int], int], least: int
    ) -> int:
        """Return the largest batch of an option, first asked where its prediction fits barely."""
        if least == self.end:
            return least

        def predicted(batch: int) -> int:
            peaks = self.peaks(batch)
            return peaks.predicted(pick(peaks))

        given = self.limit, self.step, self.end
        own = lambda batch: self.peaks(batch).own  # noqa: E731
        start = predicted_start(own, predicted, *given, least)
        return 0 if start is None else largest_within(peak, *given, start)

    def _baseline_peak(self, batch: int) -> int:
        peaks = self.peaks(batch)
        return self._logged(batch, "the baseline", peaks.compiled(peaks.problem.baseline).peak)

    def _least_peak(self, batch: int) -> int:
        peaks = self.peaks(batch)
        problem = peaks.problem
        if self._leanest is None:
            search = Search(problem.options, peaks, self.compilations)
            least = search.least(most=SETTINGS.compiled_before_refusal)
            self._leanest = least.name or problem.front.index(least)
        least = self._lean_option(peaks)
        return self._logged(batch, "the leanest plan", peaks.compiled(least).peak)

    def _least_peak_in_chunks(self, batch: int) -> int:
        peaks = self.peaks(batch)
        least = self._lean_in_chunks_or_not(peaks)
        return self._logged(batch, "the leanest plan in chunks", peaks.compiled(least).peak)

    def _lean_in_chunks_or_not(self, peaks: Peaks) -> Option:
        found = self._lean_in_chunks(peaks) if self.chunks else None
        return found or self._lean_option(peaks)

    def _lean_in_chunks(self, peaks: Peaks) -> Option | None:
        """The option in chunks of the least predicted peak, if there is any."""
        return min(self._in_chunks(peaks), key=peaks.predicted, default=None)

    def _in_chunks(self, peaks: Peaks, whole_loss: bool = False) -> list[Option]:
        return options_in_chunks(peaks, Wanted(self.limit - peaks.own, whole_loss))

    def _lean_option(self, peaks: Peaks) -> Option:
        """The option that is taken for the leanest.

        Once some were compiled, it is the leanest of these: by its name, or one of the solver by
        its place, which may be another plan at another batch.
        """
        problem = peaks.problem
        if isinstance(self._leanest, int) and problem.front:
            return problem.front[min(self._leanest, len(problem.front) - 1)]
        named = [each for each in problem.options if each.name and each.name == self._leanest]
        return named[0] if named else Search(problem.options, Peaks(problem), 0).least()

    def _logged(self, batch: int, what: str, peak: int) -> int:
        _logger.info(
            "%s: a batch of %d, %s: a peak of %s", running_name(), batch, what, memory_text(peak)
        )
        return peak
