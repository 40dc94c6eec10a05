"""The peaks of a problem's candidates, compiled or predicted, for one search."""

import logging
from collections.abc import Callable

from jrc._text import memory_text
from jrc.remat._planner.search.candidates import Candidate
from jrc.remat._planner.search.compiled_cost import CompiledCost
from jrc.remat._planner.search.problem import PlanningProblem

_logger = logging.getLogger("jrc")


class Peaks:
    """The peak of each candidate, compiled once or predicted."""

    def __init__(
        self,
        problem: PlanningProblem,
        compiled: Callable[[Candidate], CompiledCost] | None,
        who: str,
        most: int | None = None,
    ):
        self.problem, self.compiled, self.who = problem, compiled, who
        self.most = most or problem.most
        self.memory: dict[int, CompiledCost] = {}

    def of(self, i: int) -> int:
        """Return the peak of a candidate in bytes."""
        candidate = self.problem.all[i]
        if self.compiled is None:
            return self.expected(i)
        if i not in self.memory:
            count = len(self.problem.candidates)
            place = f"plan {i + 1} of {count}, the leanest first" if i < count else candidate.name
            _logger.info("%s: compiling %s%s", self.who, place, self._count())
            self.memory[i] = self.compiled(candidate)
            if self.problem.is_split:
                self._calibrate()
            peak = memory_text(self.memory[i].peak)
            _logger.info("%s: %s: a peak of %s", self.who, place, peak)
        return self.memory[i].peak

    def _count(self) -> str:
        most, number = self.most, len(self.memory) + 1
        return f" (compilation {number} of at most {max(most, number)})" if most else ""

    def expected(self, i: int) -> int:
        """Return the predicted peak of a candidate in bytes, in the light of those compiled.

        That of a way by hand is of its own gradient program, where it was followed: it has no
        place in the row, between whose candidates a line tells the peak.
        """
        candidate = self.problem.all[i]
        known = [self.problem.all[k] for k in self.memory] or list(self.problem.few)
        if i >= len(self.problem.candidates) and candidate in self.problem.followed:
            known.append(candidate)
        return self.problem.predicted(candidate, known).peak_bytes

    def _calibrate(self) -> None:
        peaks = {self.problem.all[k]: cost.peak for k, cost in self.memory.items()}
        self.problem = self.problem.calibrated(peaks)
