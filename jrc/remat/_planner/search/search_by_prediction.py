"""The search for the cheapest candidate that fits where a compilation may take a minute.

A gradient program is traced sooner than it is compiled. So predictions choose what is compiled: the
cheapest candidate that is predicted to fit, first of all. What its program really needs corrects
the predictions of the others, and the next one is chosen by these.
"""

import itertools
import math
from collections.abc import Iterator

from jrc.remat._planner.search.candidate_peaks import Peaks
from jrc.remat._planner.settings import SETTINGS

_TRACED_TOGETHER = 4


def cheapest_fitting(
    peaks: Peaks, budget: int, found: int | None = None, compilations: int = 1
) -> int | None:
    """Return the candidate of fewest FLOPs that fits, of a few that are compiled.

    Args:
        peaks: The peaks of the candidates, by number in `problem.all`; they can be compiled.
        budget: Bytes.
        found: A candidate that fits, which is returned if no cheaper one is found.
        compilations: How many candidates may be compiled.
    """
    every = peaks.problem.all
    expected = _Expected(peaks)
    limit, nearly = float(budget), SETTINGS.cheaper_margin * budget
    has_failed = False
    while compilations:
        i = expected.cheapest_within(limit, found)
        if i is None and found is not None:
            # A way by hand that is predicted to need somewhat more may fit.
            i = expected.cheapest_within(nearly, found, by_hand=True)
            nearly = (nearly + budget) / 2
        if i is None:
            break
        compilations -= 1
        predicted = expected.peak(i)
        if peaks.of(i) > budget:
            if has_failed:
                # Corrected, it was too low again: the next one has that margin.
                limit *= min(1.0, predicted / peaks.of(i))
            has_failed = True
        elif found is None or every[i].cost < every[found].cost:
            found = i
    return found


class _Expected:
    """Predicted peaks of candidates, corrected by the compiled peak of the one most alike."""

    def __init__(self, peaks: Peaks) -> None:
        self.peaks, self.problem = peaks, peaks.problem
        # A search for another budget may have followed more: no plan depends on that.
        few = [self.problem.all.index(each) for each in self.problem.few]
        self.traced = {*few, *peaks.memory}
        self.problem.follow_all(self.problem.few)
        self.own = self.problem.given + self.problem.returned
        self.order = sorted(range(len(self.problem.all)), key=self.problem.cost_order)

    @property
    def alike(self) -> list[int]:
        """The compiled candidates but nothing recomputed, where XLA recomputes as it likes."""
        top = len(self.problem.candidates) - 1
        return [k for k in self.peaks.memory if k != top]

    def cheapest_within(self, limit: float, found: int | None, by_hand: bool = False) -> int | None:
        """Return the cheapest candidate that was not compiled and is expected to fit.

        Args:
            limit: Bytes.
            found: Candidates are cheaper than this one.
            by_hand: Whether ways by hand alone are asked.
        """
        count = len(self.problem.candidates)
        fitting = (i for i in self._roughly_within(limit, found) if i >= count or not by_hand)
        for some in itertools.batched(fitting, _TRACED_TOGETHER):
            self.problem.follow_all(self.problem.all[i] for i in some)
            for i in some:
                if self.peak(i) <= limit and not self._is_compiled(i):
                    return i
        return None

    def peak(self, i: int) -> float:
        """Return the peak of a candidate's own gradient program, corrected."""
        return self._corrected(self._followed(i))

    def _roughly_within(self, limit: float, found: int | None) -> Iterator[int]:
        """Yield candidates that may fit, the cheapest first; their programs are not traced yet."""
        every, count = self.problem.all, len(self.problem.candidates)
        for i in self.order:
            if found is not None and every[i].cost >= every[found].cost:
                break
            margin = SETTINGS.compiled_margin if i < count - 1 else SETTINGS.followed_margin
            if i not in self.peaks.memory and self._corrected(self._rough(i)) <= margin * limit:
                yield i

    def _rough(self, i: int) -> int:
        """The peak of a program that this search traced, or one on the lines through these."""
        if self.problem.is_split:
            return self.own + self.problem.all[i].temporaries
        traced = [self.problem.all[k] for k in self.traced]
        return self.problem.predicted(self.problem.all[i], traced).peak_bytes

    def _followed(self, i: int) -> int:
        self.traced.add(i)
        return self.problem.follow(self.problem.all[i])

    def _is_compiled(self, i: int) -> bool:
        """Whether a candidate of equal cost and peak was compiled: one program, or nearly."""
        every = self.problem.all
        own = every[i].cost, self._followed(i)
        return own in ((every[k].cost, self._followed(k)) for k in self.peaks.memory)

    def _corrected(self, peak: int) -> float:
        """A predicted peak, times the error of the compiled candidate of the closest prediction.

        The farther that prediction is, the less its error counts: at a factor of e not at all. A
        split program is predicted whole, and compiled for one device: there it counts in full.
        """
        if not self.alike:
            return peak

        def distance(k: int) -> float:
            return abs(math.log(self._temporaries(self._followed(k)) / self._temporaries(peak)))

        nearest = min(self.alike, key=distance)
        predicted = self._temporaries(self._followed(nearest))
        error = self._temporaries(self.peaks.of(nearest)) / predicted
        counts = 1.0 if self.problem.is_split else max(0.0, 1 - distance(nearest))
        return self.own + error**counts * (peak - self.own)

    def _temporaries(self, peak: float) -> float:
        return max(peak - self.own, 1.0)
