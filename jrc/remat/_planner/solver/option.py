"""An option: one way to run a program, or a construct inside of one, with its predicted cost.

The same value serves at every depth: for a branch, for the body of a loop, for the whole function.

>>> costs = {90: 7, 10: 9, 50: 9, 60: 4}
>>> rows = [Option(peak, 0, cost) for peak, cost in costs.items()]
>>> [(each.peak, each.cost) for each in undominated(rows)]
[(10, 9), (60, 4)]
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from jrc.remat._chunks.chunks import Chunks
from jrc.remat._planner.plan.decision import Baseline, Decision, Stage, Stages
from jrc.remat._planner.settings import SETTINGS

Family = Literal["baseline", "solver", "fewest FLOPs", "policy", "regions", "all regions"]
"""How an option came about: the baseline, the solver's own by its cost or by FLOPs, a policy of
`jax.checkpoint`, regions under a `jax.checkpoint` but for the last, which is left to JAX, or all
regions. Models of peaks err alike within a family, so that one compiled option says something of
the others."""


@dataclasses.dataclass(frozen=True, eq=False)
class Option:
    """One way to run a program, or a construct, and what the planner's model says of it.

    Attributes:
        peak: Bytes while it is differentiated, besides its arguments and results; of a loop, all
            steps together.
        saved: Bytes among them that are saved after the forward pass.
        cost: How much longer it takes than the baseline, in the unit of the cost graph (FLOPs).
        make_decision: Returns the decision. Few options of a front are looked at, so that theirs
            are made when they are asked for.
        name: What a manual plan is called; of a construct's, what it saves.
        host: Bytes that are saved in the host's memory.
        family: How it came about.
        chunks: Regions of the function that run in chunks; the rest is said of the program with
            these loops.
    """

    peak: int
    saved: int
    cost: int
    make_decision: Callable[[], Decision | Stage] = dataclasses.field(default=Baseline, repr=False)
    name: str = ""
    host: int = 0
    family: Family = "solver"
    chunks: tuple[Chunks, ...] = ()

    def __eq__(self, other: object) -> bool:
        """Whether all is equal; decisions are compared where all else is."""
        return self is other or (
            isinstance(other, Option)
            and self._figures == other._figures
            and self.chunks == other.chunks
            and self.decision == other.decision
        )

    def __hash__(self) -> int:
        """Return a hash of all but the decision and the chunks."""
        return hash(self._figures)

    @property
    def _figures(self) -> tuple[Any, ...]:
        return self.peak, self.saved, self.cost, self.name, self.host, self.family

    @property
    def is_baseline(self) -> bool:
        """Whether it is the function as it is: nothing is recomputed, nothing in chunks."""
        return self.family == "baseline" and not self.chunks

    @functools.cached_property
    def decision(self) -> Decision | Stage:
        """What is saved and recomputed: of a program, or of a construct as a stage of one."""
        return self.make_decision()

    @property
    def whole(self) -> Decision:
        """The decision, of an option for a whole program."""
        assert isinstance(self.decision, Decision)
        return self.decision

    @property
    def stages(self) -> Stages:
        """The decision, of an option that the solver made."""
        assert isinstance(self.decision, Stages)
        return self.decision


def made[T](decision: T) -> Callable[[], T]:
    """Return the `make_decision` of a decision that is made already."""
    return lambda: decision


def undominated(options: Iterable[Option]) -> list[Option]:
    """Return the options that no other beats in peak, saved bytes, cost and bytes on the host."""
    front: list[Option] = []
    for option in sorted(options, key=lambda each: (each.peak, each.cost, each.saved)):
        if not any(_is_as_good(other, option) for other in front):
            front.append(option)
    return front


def _is_as_good(one: Option, other: Option) -> bool:
    """Whether an option of no larger peak needs no more of all else either."""
    return one.cost <= other.cost and one.saved <= other.saved and one.host <= other.host


def spread_options(front: Sequence[Option], base: float, count: int) -> list[Option]:
    """Return about `count` options of a front, spread as `spread_evenly` does."""
    peaks, costs = [each.peak for each in front], [each.cost for each in front]
    return spread_evenly(front, peaks, costs, base, count)


def spread_evenly[T](
    front: Sequence[T], peaks: Sequence[float], costs: Sequence[float], base: float, count: int
) -> list[T]:
    """Return about `count` of a front, close where bytes or cost change fast; both ends stay.

    Args:
        front: The leanest first.
        peaks: Bytes of each.
        costs: The cost of each.
        base: What a change of cost is compared with.
        count: How many; of one it is the leanest.
    """
    if len(front) <= count:
        return list(front)
    if count == 1:
        return [front[0]]
    length = [0.0]
    for k in range(len(front) - 1):
        memory = abs(math.log(max(peaks[k + 1], 1) / max(peaks[k], 1)))
        cost = abs(costs[k] - costs[k + 1]) / base
        length.append(length[-1] + memory + SETTINGS.cost_weight * cost)
    found, k = [], 0
    for i in range(count):
        while length[k] < length[-1] * i / (count - 1) - 1e-12:
            k += 1
        found.append(k)
    return [front[k] for k in dict.fromkeys([*found, len(front) - 1])]
