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
>>> options = [Option(10, 0, 30), Option(50, 0, 7), Option(100, 0, 0)]
>>> search = Search(options, Exact(), compilations=3)
>>> search.cheapest_fitting(60).cost, len(search.compiled)
(7, 1)
"""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from jrc.remat._planner.search.compiled_cost import CompiledCost
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._planner.solver.option import Family, Option


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
            key=lambda each: (each.cost, not each.is_baseline, each.peak),
        )
        self.compiled: dict[Option, int] = {}
        self.before: dict[Option, int] = {}
        self._predicted: dict[Option, int] = {}
        self._else = 0  # bytes that the larger program needs besides

    def cheapest_fitting(self, budget: int) -> Option | None:
        """Return the cheapest option that fits, of those that the search looks at.

        An option that needs more than the budget shows that predictions are too low there: the next
        one of its family is to be expected below it by as much.
        """
        if not self.compilations:
            return self._expected_to_fit(self.options, budget, {})
        shares: dict[Family, float] = {}
        while len(self.compiled) < self.compilations:
            best = self.best(budget)
            left = [each for each in self._not_compiled() if _is_better(each, best)]
            chosen = self._expected_to_fit(left, budget, shares)
            if chosen is None:
                chosen = self._leanest(left) if best is None else self._halfway(left, budget, best)
            if chosen is None:
                break
            peak, family = self.compile(chosen), chosen.family
            shares[family] = min(1.0, shares.get(family, 1.0) * budget / peak)
            if peak <= budget:
                shares.clear()
        return self.best(budget)

    def least(self, enough: float = 0, most: int = 1) -> Option:
        """Return the option of the least peak, of those that may be the leanest.

        The leanest of each family is compiled first, if it may be the leanest.

        Args:
            enough: Bytes; no further option is compiled once one needs at most this.
            most: How many options may be compiled.
        """
        if not self.compilations:
            return min(self.options, key=self.predicted)
        for _ in range(most):
            least = min(self.compiled.values(), default=math.inf)
            chosen = self._lean_candidate(least, enough)
            if chosen is None or least <= enough:
                break
            self.compile(chosen)
        return min(self.compiled, key=lambda each: self.compiled[each])

    def allow_more(self, count: int) -> None:
        """Let this search compile at least so many more programs."""
        self.compilations = max(self.compilations, len(self.compiled) + count)

    def best(self, budget: int) -> Option | None:
        """Return the cheapest compiled option that fits."""
        fitting = (each for each in self.options if self.compiled.get(each, math.inf) <= budget)
        return next(fitting, None)

    def compile(self, option: Option) -> int:
        """Compile an option and return its peak in bytes."""
        if option not in self.compiled:
            self.before[option] = self.predicted(option)
            self.compiled[option] = self.peaks.compiled(option).peak
            # The baseline and the first other option say what the larger program needs besides.
            others = [each for each in self.compiled if not each.is_baseline]
            if self.peaks.is_inside and others in ([], [option]):
                self._else += self.compiled[option] - self.before[option]
        return self.compiled[option]

    def predicted(self, option: Option) -> int:
        """Return the best prediction of an option's peak in bytes that needs no compilation."""
        self._predict([option])
        return self.expected(option)

    def expected(self, option: Option) -> int:
        """Return the peak of an option in bytes, in the light of what this search knows.

        A prediction is corrected by the error of the compiled option whose prediction is nearest,
        and rather of one of its own family. What the solver's model says, where nothing better is
        known, is corrected by that of the nearest predicted one.
        """
        if option in self.compiled:
            return self.compiled[option]
        modelled, predicted = self.peaks.modelled, self._predicted
        peak: float = predicted.get(option, 0)
        if not peak:
            known = [(each, modelled(each), x) for each, x in predicted.items()]
            peak = self._corrected(option, modelled(option), known)
        compiled = ((each, x - self._else) for each, x in self.compiled.items())
        # XLA recomputes of its own accord in the baseline: its error is one of its own.
        known = [(each, predicted[each], x) for each, x in compiled if not each.is_baseline]
        return int(self._corrected(option, peak, known)) + self._else

    def _corrected(
        self, option: Option, peak: float, known: Sequence[tuple[Option, int, int]]
    ) -> float:
        """A peak times the error of the nearest known one.

        Args:
            option: The option.
            peak: Its peak.
            known: Options with their peaks by the same model, and as they are known.
        """

        def distance(entry: tuple[Option, int, int]) -> float:
            apart = _distance(entry[0].family, option.family)
            return abs(math.log(self._beside(entry[1]) / self._beside(peak))) + apart

        if not known:
            return peak
        _, model, better = min(known, key=distance)
        error = self._beside(better) / self._beside(model)
        return self.peaks.own + max(peak - self.peaks.own, 0) * error

    def _beside(self, peak: float) -> float:
        """The temporaries of a peak."""
        return max(peak - self.peaks.own, 1.0)

    def _expected_to_fit(
        self, options: Sequence[Option], budget: int, shares: Mapping[Family, float]
    ) -> Option | None:
        """The cheapest of these that is predicted to fit, by a prediction of its own.

        Args:
            options: The options, the cheapest first.
            budget: Bytes.
            shares: What share of the budget is left to the options of a family; all, if not given.
        """
        while True:
            fitting = [
                each
                for each in options
                if self.expected(each) <= budget * shares.get(each.family, 1.0)
            ]
            if not fitting or not self._predict(fitting):
                return fitting[0] if fitting else None

    def _lean_candidate(self, least: float, enough: float) -> Option | None:
        """The option to compile next, to find one that needs less than the least, or just enough.

        Behind the first of each family one that should need clearly less or just enough, or else
        one that is unlike those that are compiled.
        """
        known = {each.family for each in self.compiled}
        left = self._not_compiled()
        first = self._leanest([each for each in left if each.family not in known])
        # What other families need beyond their predictions says little of it.
        if first is not None and self._predicted[first] < SETTINGS.lean_margin * least:
            return first
        lean = self._leanest(left, 1.0)
        if lean is not None:
            gain = SETTINGS.worthwhile_gain * self._beside(least)
            if self.expected(lean) <= enough or self._beside(self.expected(lean)) < gain:
                return lean
        unlike = [each for each in left if not any(self._are_alike(each, k) for k in self.compiled)]
        chosen = self._leanest(unlike)
        margin = SETTINGS.unlike_margin * self._beside(least)
        return chosen if chosen and self._beside(self.expected(chosen)) < margin else None

    def _are_alike(self, one: Option, other: Option) -> bool:
        """Whether two options are of one family, and nearly equal in peak and in cost."""
        peaks = [max(each.peak, 1) for each in (one, other)]
        is_near = max(peaks) <= SETTINGS.nearly_equal * min(peaks)
        is_equally_dear = abs(one.cost - other.cost) < self._much
        return is_near and is_equally_dear and one.family == other.family

    @property
    def _much(self) -> float:
        """What counts as much in cost."""
        return SETTINGS.much_cheaper * self.options[-1].cost

    def _leanest(
        self, options: Sequence[Option], nearly: float = SETTINGS.nearly_equal
    ) -> Option | None:
        """The option of least peak, by a prediction of its own; of nearly equal ones the cheapest.

        Predictions tell no small difference, and what costs more is cut into more parts.
        """
        while options:
            least = min(map(self.expected, options))
            # What is expected inside of a larger program may be below zero.
            limit = least + (nearly - 1) * abs(least)
            leanest = [each for each in options if self.expected(each) <= limit]
            if not self._predict(leanest):
                return leanest[0]
        return None

    def _halfway(self, options: Sequence[Option], budget: int, best: Option) -> Option | None:
        """Of cheaper options that may fit, that which is halfway in cost to one that does not.

        One that would save much may be expected to need more beyond the budget.
        """
        failed = [each.cost for each in self.compiled if each.cost < best.cost]
        middle = (best.cost + max(failed, default=0)) / 2

        def may_fit(each: Option) -> bool:
            is_much = best.cost - each.cost >= self._much
            margin = SETTINGS.tried_if_much if is_much else SETTINGS.tried_above_budget
            return self.expected(each) <= margin * budget

        likely = filter(may_fit, options)
        return min(likely, key=lambda each: abs(each.cost - middle), default=None)

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


def _is_better(option: Option, best: Option | None) -> bool:
    """Whether an option is cheaper than the best, or is the baseline at an equal cost."""
    if best is None or option.cost < best.cost:
        return True
    return option.cost == best.cost and option.is_baseline


def _distance(one: Family, other: Family) -> float:
    """How far the error of a family is from that of another, as the logarithm of a factor."""
    if one == other:
        return 0.0
    is_near = {one, other} == {"regions", "all regions"}
    return SETTINGS.near_family if is_near else SETTINGS.other_family
