"""The search: which option fits a budget, found by compiling a few of them.

What is predicted of a peak has an error, and a compiled peak shows that of its own option, and
something of those like it (`model_errors`); so it is with seconds. Of the options that would be
better than the best so far the search compiles the one of which it expects most: how much cheaper
it is, times how likely it fits.

>>> from jrc.remat._planner.costs.compilers import Compiler
>>> from jrc.remat._planner.solver.option import Option
>>> class Exact:
...     own, is_inside = 0, False
...     errors = Compiler.peak_errors, Compiler.time_errors
...     predicted = lambda self, option: option.peak
...     compiled = lambda self, option: CompiledCost(0, 0, option.peak, 0)
...     are_costs_exact = True
...     predicted_cost = compiled_cost = lambda self, option: option.cost
>>> options = [Option(10, 0, 30), Option(50, 0, 7), Option(100, 0, 0, family="baseline")]
>>> search = Search(options, Exact(), compilations=3)
>>> search.cheapest_fitting(60).cost, len(search.compiled)
(7, 2)

Source: the acquisition is the expected improvement under a constraint of Gardner et al., "Bayesian
Optimization with Inequality Constraints", ICML 2014, section 3.1.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import jax
import numpy as np

from jrc._errors import running_name
from jrc.remat._planner.costs.error_sizes import ErrorSizes
from jrc.remat._planner.search.compiled_cost import CompiledCost
from jrc.remat._planner.search.model_errors import ModelErrors
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._planner.solver.option import Option

_logger = logging.getLogger("jrc")


@runtime_checkable
class KnownPeaks(Protocol):
    """What a search asks for; `Peaks` of a problem, or of a test."""

    @property
    def own(self) -> int:
        """Bytes of arguments and results, which every peak has."""

    @property
    def is_inside(self) -> bool:
        """Whether a larger program is compiled, and what else it needs is in no prediction."""

    @property
    def errors(self) -> tuple[ErrorSizes, ErrorSizes]:
        """How far off predicted temporaries and seconds are."""

    @property
    def are_costs_exact(self) -> bool:
        """Whether the predicted cost is the true one."""

    def predicted(self, option: Option) -> int:
        """Return the peak of an option in bytes, as the solver's model has it."""

    def predicted_cost(self, option: Option) -> int:
        """Return the cost of the program under an option, as the model has it; positive."""

    def compiled_cost(self, option: Option) -> int | None:
        """Return the same of an option that was compiled; `None` where it is not known."""

    def compiled(self, option: Option) -> CompiledCost:
        """Return what the compiled program of an option costs."""


class Search:
    """The search for one budget. It knows only what it asked for, so that no other search counts.

    Attributes:
        asked: How many programs it was to compile at most; see `allow_more`.
        compilations: How many it may compile now.
        compiled: The peaks of the options that this search compiled.
        before: What it expected of each of them before: its peak, and its cost.
        failed: What the compiler raised of others, which are left out.

    Args:
        options: The options.
        peaks: What is known of their peaks.
        compilations: How many programs may be compiled; with 0 predictions alone decide.
    """

    def __init__(self, options: Sequence[Option], peaks: KnownPeaks, compilations: int) -> None:
        self.peaks, self.asked, self.compilations = peaks, compilations, compilations
        self.compiled: dict[Option, int] = {}
        self.before: dict[Option, tuple[int, float]] = {}
        self.failed: dict[Option, Exception] = {}
        self._else = 0  # bytes that the larger program needs besides
        self.options: list[Option] = []
        self.add(options)

    def add(self, options: Sequence[Option]) -> bool:
        """Let the search choose from more options; return whether one of them is new."""
        known = set(self.options)
        new = [each for each in options if each not in known]
        if new:
            self._set([*self.options, *new])
        return bool(new)

    def take_in(self, other: "Search") -> None:
        """Let what another search compiled be known, of options that this one has."""
        for each in other.compiled:
            self.compile(each)

    def _set(self, options: Sequence[Option]) -> None:
        peaks = self.peaks
        predicted = {each: peaks.predicted_cost(each) for each in options}
        # Of equal cost the baseline comes first: then nothing need be recomputed.
        self.options = sorted(
            options, key=lambda each: (predicted[each], not each.is_baseline, each.peak)
        )
        self._costs = np.array([float(predicted[each]) for each in self.options])
        self._at = {each: i for i, each in enumerate(self.options)}
        temporaries = [self._beside(peaks.predicted(each)) for each in self.options]
        self._predicted = np.log(temporaries)
        self._errors, self._time_errors = (
            ModelErrors(self.options, temporaries, sizes) for sizes in peaks.errors
        )

    def cheapest_fitting(self, budget: int) -> Option | None:
        """Return the cheapest option that fits, of those that the search compiles.

        Without compilations it is the cheapest that is predicted to fit.
        """
        if not self.compilations:
            return self.expected_fitting(budget)
        while len(self.compiled) < self.compilations and self._few_failed:
            chosen = self._most_gain(budget)
            if chosen is None:
                break
            self.attempt(chosen)
        return self.best(budget)

    def expected_fitting(self, budget: int) -> Option | None:
        """Return the cheapest option that is expected to fit."""
        options = (each for each in self.options if each not in self.failed)
        return next((each for each in options if self.expected(each) <= budget), None)

    def temporaries_within(self, budget: int) -> int:
        """Return what a budget leaves for temporaries, in the light of what this search knows."""
        return budget - self.peaks.own - self._else

    def least(self, enough: float = 0, most: int = 1) -> Option:
        """Return the option of the least peak, of those that may be the leanest.

        Args:
            enough: Bytes; no further option is compiled once one needs at most this.
            most: How many options may be compiled.
        """
        if not self.compilations:
            return min(self.options, key=self.expected)
        enough_compiled = len(self.compiled) + most
        while len(self.compiled) < enough_compiled and self._few_failed:
            least = min(self.compiled.values(), default=math.inf)
            chosen = None if least <= enough else self._most_bytes_saved(least)
            if chosen is None:
                break
            self.attempt(chosen)
        if not self.compiled:
            raise next(iter(self.failed.values()))
        return min(self.compiled, key=lambda each: self.compiled[each])

    def allow_more(self, count: int) -> None:
        """Let this search compile at least so many more programs."""
        self.compilations = max(self.compilations, len(self.compiled) + count)

    def best(self, budget: int) -> Option | None:
        """Return the cheapest compiled option that fits."""
        return next(iter(self.fitting(budget)), None)

    def fitting(self, budget: int) -> list[Option]:
        """Return the compiled options that fit, the cheapest first."""
        fitting = (each for each in self.options if self.compiled.get(each, math.inf) <= budget)
        return sorted(fitting, key=self._compiled_cost)

    def _compiled_cost(self, option: Option) -> float:
        """The cost of a compiled option; the baseline is taken where others gain too little."""
        cost = self.peaks.compiled_cost(option)
        if cost is None:
            return math.inf
        is_favoured = option.is_baseline and not self.peaks.are_costs_exact
        return cost * (1 - SETTINGS.least_time_gain * is_favoured)

    @property
    def _few_failed(self) -> bool:
        """Whether others may still compile: twice as many failures as compilations end a search."""
        return len(self.failed) < 2 * max(self.compilations, 1)

    def attempt(self, option: Option) -> int | None:
        """Compile an option and return its peak in bytes; `None` where its compiler fails.

        A compiler that fails for one program (a kernel of too many blocks, say) may take another.
        """
        try:
            return self.compile(option)
        except jax.errors.JaxRuntimeError as error:
            self.failed[option] = error
            what = option.name or "a plan"
            reason = str(error).partition("\n")[0]
            _logger.warning("%s: no compiled program of %s: %s", running_name(), what, reason)
            return None

    def compile(self, option: Option) -> int:
        """Compile an option and return its peak in bytes."""
        if option not in self.compiled:
            self.before[option] = self.expected(option), self.expected_cost(option)
            self.compiled[option] = self.peaks.compiled(option).peak
            # The baseline and the first other option say what the larger program needs besides.
            others = [each for each in self.compiled if not each.is_baseline]
            if self.peaks.is_inside and others in ([], [option]):
                self._else += self.compiled[option] - self.before[option][0]
        return self.compiled[option]

    def expected(self, option: Option) -> int:
        """Return the peak of an option in bytes, in the light of what this search knows."""
        if option in self.compiled:
            return self.compiled[option]
        means, _ = self._log_temporaries()
        return int(self.peaks.own + self._else + math.exp(means[self._at[option]]))

    def expected_cost(self, option: Option) -> float:
        """Return the cost of an option, in the light of those compiled."""
        means, _ = self._expected_costs()
        return float(means[self._at[option]])

    def _most_gain(self, budget: int) -> Option | None:
        """The option to compile next: the one that promises the greatest saving.

        `None` where no other is likely enough to fit, or saves enough.
        """
        best = self.best(budget)
        costs, uncertain = self._expected_costs()
        cheapest = costs.min()
        dearest = costs.max() - cheapest
        available = math.log(self._beside(budget))
        if best is not None:
            limit = costs[self._at[best]] - cheapest
        else:
            fallback = costs[self._surely_fits(available)].min(initial=costs.max())
            limit = SETTINGS.dearest_counts * (fallback - cheapest) + 1
        prefers_baseline = best is None or not best.is_baseline

        def gain(option: Option, mean: float, deviation: float) -> float:
            i = self._at[option]
            # Of equal cost the baseline is better: nothing is recomputed.
            saved = limit - (costs[i] - cheapest) + (option.is_baseline and prefers_baseline)
            return _mean_above_zero(saved, uncertain[i]) * _normal((available - mean) / deviation)

        if best is None:
            return self._greatest(gain, SETTINGS.hopeless * limit)
        least = SETTINGS.least_gain * dearest
        if not self.peaks.are_costs_exact:
            least = max(least, SETTINGS.least_time_gain * cheapest)
        return self._greatest(gain, least)

    def _surely_fits(self, available: float) -> np.ndarray:
        """Whether each option fits nearly surely; those compiled, of which none fits, do not."""
        means, deviations = self._log_temporaries()
        fits = (available - means) / deviations > SETTINGS.surely_fits
        fits[[self._at[each] for each in (*self.compiled, *self.failed)]] = False
        return fits

    def _expected_costs(self) -> tuple[np.ndarray, np.ndarray]:
        """The costs of all options, in the light of those compiled: means, and deviations."""
        if self.peaks.are_costs_exact:
            return self._costs, np.zeros_like(self._costs)
        costs = {self._at[each]: self.peaks.compiled_cost(each) for each in self.compiled}
        known = {i: math.log(cost / self._costs[i]) for i, cost in costs.items() if cost}
        errors, deviations = self._time_errors.given(known)
        means = self._costs * np.exp(errors)
        if not known:
            # What all have in common makes none of them cheaper than another.
            _, of_seconds = self.peaks.errors
            return means, means * of_seconds.of_option
        deviations[list(known)] = 0.0
        return means, means * deviations

    def _most_bytes_saved(self, least: float) -> Option | None:
        """The option that promises most bytes less than the least peak, if it promises enough."""
        if math.isinf(least):
            return self._greatest(lambda option, mean, deviation: math.exp(-mean), 0.0)
        temporaries = self._beside(least)

        def gain(option: Option, mean: float, deviation: float) -> float:
            z = (math.log(temporaries) - mean) / deviation
            rest = math.exp(mean + deviation**2 / 2) * _normal(z - deviation)
            return temporaries * _normal(z) - rest

        found = self._greatest(gain, SETTINGS.least_bytes_gain * temporaries)
        return self._of_new_family(least) if found is None else found

    def _of_new_family(self, least: float) -> Option | None:
        """The leanest option of a family of which none is compiled, if it may be the leanest.

        What other families need beyond their predictions says little of it, least where temporaries
        are few beside arguments and results.
        """
        known = {each.family for each in (*self.compiled, *self.failed)}
        new = [each for each in self.options if each.family not in known]
        predicted = self.peaks.predicted
        leanest = min(new, key=predicted, default=None)
        margin = SETTINGS.lean_margin * (least - self._else)
        return leanest if leanest is not None and predicted(leanest) < margin else None

    def _greatest(
        self, gain: Callable[[Option, float, float], float], least: float
    ) -> Option | None:
        """The option of the greatest gain; `None` where it is not above the least.

        Args:
            gain: Of an option, and of its temporaries the mean and the deviation of the logarithm.
            least: What it must be above.
        """
        means, deviations = self._log_temporaries()
        # A compiler that fails for a program in chunks fails for the next plan of it as well.
        broken = {each.chunks for each in self.failed if each.chunks}
        gains = {
            option: gain(option, float(means[i]), float(deviations[i]))
            for option, i in self._at.items()
            if option not in self.compiled
            and option not in self.failed
            and option.chunks not in broken
        }
        best = max(gains, key=lambda each: gains[each], default=None)
        return best if best is not None and gains[best] > least else None

    def _log_temporaries(self) -> tuple[np.ndarray, np.ndarray]:
        """The logarithms of the temporaries of all options: means and standard deviations."""
        known = {
            i: math.log(self._beside(self.compiled[each] - self._else)) - self._predicted[i]
            for each, i in self._at.items()
            if each in self.compiled
        }
        errors, deviations = self._errors.given(known)
        return self._predicted + errors, deviations

    def _beside(self, peak: float) -> float:
        """The temporaries of a peak."""
        return max(peak - self.peaks.own, 1.0)


def _mean_above_zero(mean: float, deviation: float) -> float:
    """The mean of the positive part of a normal variable."""
    if deviation <= 0:
        return max(mean, 0.0)
    z = mean / deviation
    return mean * _normal(z) + deviation * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def _normal(z: float) -> float:
    """The probability that a standard normal variable is at most this."""
    return 0.5 * math.erfc(-z / math.sqrt(2))
