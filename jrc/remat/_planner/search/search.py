"""The search: which option fits a budget, found by compiling a few of them.

Options are asked for in the order of their cost: the cheapest that is expected to fit is compiled
first. What it needs corrects what is expected of the others. Once one fits, what is left of the
compilations goes to cheaper ones that are most likely to fit.

>>> from jrc.remat._planner.solver.option import Option
>>> class Exact:
...     own, is_inside = 0, False
...     modelled = predicted = lambda self, option: option.peak
...     predict = lambda self, options: None
...     compiled = lambda self, option: CompiledCost(0, 0, option.peak, 0)
>>> options = [Option(10, 0, 30), Option(50, 0, 7), Option(90, 0, 0)]
>>> search = Search(options, Exact(), compilations=3)
>>> search.cheapest_fitting(60).cost, len(search.compiled)
(7, 1)
"""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from jrc.remat._planner.plan.decision import Baseline
from jrc.remat._planner.search.compiled_cost import CompiledCost
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._planner.solver.option import Option


@runtime_checkable
class KnownPeaks(Protocol):
    """What a search asks for; `Peaks` of a problem, or of a test."""

    @property
    def own(self) -> int:
        """Bytes of arguments and results, which every peak has."""

    @property
    def is_inside(self) -> bool:
        """Whether a larger program is compiled, and what else it needs is in no prediction."""

    def modelled(self, option: Option) -> int:
        """Return the peak of an option in bytes, as the solver's model has it."""

    def predict(self, options: Sequence[Option]) -> None:
        """Predict the peaks of some options together."""

    def predicted(self, option: Option) -> int:
        """Return the best prediction of a peak in bytes that needs no compilation."""

    def compiled(self, option: Option) -> CompiledCost:
        """Return what the compiled program of an option costs."""


class Search:
    """The search for one budget. It knows only what it asked for, so that no other search counts.

    Attributes:
        compiled: The peaks of the options that this search compiled.
        before: What it expected of each of them before.

    Args:
        options: The options.
        peaks: What is known of their peaks.
        compilations: How many programs may be compiled; with 0 predictions alone decide.
    """

    def __init__(self, options: Sequence[Option], peaks: KnownPeaks, compilations: int) -> None:
        self.peaks, self.compilations = peaks, compilations
        # Of equal cost the baseline comes first: then nothing need be recomputed.
        self.options = sorted(
            options,
            key=lambda each: (each.cost, not isinstance(each.decision, Baseline), each.peak),
        )
        self.compiled: dict[Option, int] = {}
        self.before: dict[Option, int] = {}
        self._predicted: dict[Option, int] = {}
        self._else = 0  # bytes that the larger program needs besides

    def cheapest_fitting(self, budget: int) -> Option | None:
        """Return the cheapest option that fits, of those that the search looks at."""
        if not self.compilations:
            return self._expected_to_fit(self.options, budget)
        while len(self.compiled) < self.compilations:
            best = self.best(budget)
            left = [each for each in self._not_compiled() if best is None or each.cost < best.cost]
            chosen = self._expected_to_fit(left, budget)
            if chosen is None:
                chosen = self._leanest(left) if best is None else self._worth_a_try(left, budget)
            if chosen is None:
                break
            self.compile(chosen)
        return self.best(budget)

    def least(self, enough: float = 0, most: int = 1) -> Option:
        """Return the option of the least peak, of those that may be the leanest.

        Args:
            enough: Bytes; no further option is compiled once one needs at most this.
            most: How many options may be compiled.
        """
        if not self.compilations:
            return self._leanest(self.options) or self.options[0]
        for _ in range(most):
            chosen = self._leanest(self._not_compiled())
            least = min(self.compiled.values(), default=math.inf)
            if chosen is None or least <= enough or self.expected(chosen) >= least:
                break
            self.compile(chosen)
        return min(self.compiled, key=lambda each: self.compiled[each])

    def best(self, budget: int) -> Option | None:
        """Return the cheapest compiled option that fits."""
        fitting = (each for each in self.options if self.compiled.get(each, math.inf) <= budget)
        return next(fitting, None)

    def compile(self, option: Option) -> int:
        """Compile an option and return its peak in bytes."""
        if option not in self.compiled:
            self.before[option] = self.predicted(option)
            self.compiled[option] = self.peaks.compiled(option).peak
            if self.peaks.is_inside and len(self.compiled) == 1:
                self._else = self.compiled[option] - self.before[option]
        return self.compiled[option]

    def predicted(self, option: Option) -> int:
        """Return the best prediction of an option's peak in bytes that needs no compilation."""
        self._predict([option])
        return self.expected(option)

    def expected(self, option: Option) -> int:
        """Return the peak of an option in bytes, in the light of what this search knows.

        A prediction is corrected by the error of the compiled option whose prediction is nearest;
        what the solver's model says, where nothing better is known, by that of the nearest
        predicted one.
        """
        if option in self.compiled:
            return self.compiled[option]
        peak: float = self._predicted.get(option, 0)
        if not peak:
            known = {self.peaks.modelled(each): x for each, x in self._predicted.items()}
            peak = self._corrected(self.peaks.modelled(option), known)
        known = {self._predicted[k]: x - self._else for k, x in self.compiled.items()}
        return int(self._corrected(peak, known)) + self._else

    def _corrected(self, peak: float, known: Mapping[int, int]) -> float:
        """A peak times the error of the nearest one of which more is known."""
        if not known:
            return peak
        nearest = min(known, key=lambda x: abs(math.log(self._beside(x) / self._beside(peak))))
        error = self._beside(known[nearest]) / self._beside(nearest)
        return self.peaks.own + max(peak - self.peaks.own, 0) * error

    def _beside(self, peak: float) -> float:
        """The temporaries of a peak."""
        return max(peak - self.peaks.own, 1.0)

    def _expected_to_fit(self, options: Sequence[Option], budget: int) -> Option | None:
        """The cheapest of these that is predicted to fit, by a prediction of its own."""
        while True:
            fitting = [each for each in options if self.expected(each) <= budget]
            if not fitting or not self._predict(fitting):
                return fitting[0] if fitting else None

    def _leanest(self, options: Sequence[Option]) -> Option | None:
        """The option of least peak, by a prediction of its own."""
        while options:
            leanest = sorted(options, key=self.expected)
            if not self._predict(leanest):
                return leanest[0]
        return None

    def _worth_a_try(self, options: Sequence[Option], budget: int) -> Option | None:
        """The one most likely to fit, if that is likely, or would save much."""
        return min(
            (
                each
                for each in options
                if self.expected(each) <= SETTINGS.tried_above_budget * budget
            ),
            key=self.expected,
            default=None,
        )

    def _predict(self, options: Sequence[Option]) -> bool:
        """Predict the first of these, with some behind it, unless it is; return whether it was."""
        if options[0] in self._predicted:
            return False
        some = [each for each in options if each not in self._predicted]
        some = some[: SETTINGS.predicted_together]
        self.peaks.predict(some)
        self._predicted |= {each: self.peaks.predicted(each) for each in some}
        return True

    def _not_compiled(self) -> list[Option]:
        return [each for each in self.options if each not in self.compiled]
