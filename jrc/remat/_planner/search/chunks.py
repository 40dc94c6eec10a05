"""The problems of a function with regions in chunks, those that promise most for a budget.

The function with some regions in chunks is a function like any other: it is traced and solved like
it, and its options stand beside those of the function as it is. Nothing is compiled here; to trace
and to solve a way takes a second where the program is large, so each is made once. Which values are
wide, and how many bytes a chunk may have, are powers of two near what a budget leaves for
temporaries, so that near budgets look at the same ways. Each set of regions is tried with fewer and
fewer bytes a chunk, as long as the cheapest option that is predicted to fit becomes cheaper. Where
a plan without chunks fits, larger sets are tried under the same condition. Where one is predicted
to fit that costs hardly more than the operations of the baseline, no more are tried. Regions in
chunks inside of a chunk of the whole loss stay where they gain more than the model may be wrong by.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jrc._errors import named_like
from jrc.remat._chunks.chunks import Chunks
from jrc.remat._chunks.region_inside import RegionInside
from jrc.remat._chunks.regions_within import regions_within
from jrc.remat._planner.costs.compilers import compiler_on
from jrc.remat._planner.execute.chunked_function import chunked_function
from jrc.remat._planner.search.problem import Problem, Request
from jrc.remat._planner.search.whole_loss import (
    holds_all,
    holds_all_products,
    in_chunks_of_loss,
    whole_loss_chunks,
)
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._planner.solver.option import Option


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What ways to run a function in chunks are looked for.

    Attributes:
        temporaries: Bytes that there are for temporaries.
        whole_loss: Whether the whole loss may run in chunks.
        leanest: Whether the leanest way is one of them, whatever it costs: a region may hold all
            that is dear, and those that promise most are cut into the smallest chunks too.
        is_urgent: Whether nothing fits without chunks. Else only the best so far is gone on with.
    """

    temporaries: int
    whole_loss: bool = True
    leanest: bool = False
    is_urgent: bool = True


type _Regions = dict[tuple[tuple[Chunks, ...], int, bool], list[RegionInside]]
"""Regions of the function with some chunks, around values of some bytes, around loops or not."""


class ProblemsInChunks:
    """The problems of a function with regions in chunks.

    Args:
        problem: The problem of the function as it is.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._made: dict[tuple[Chunks, ...], Problem | None] = {}
        self._regions: _Regions = {}
        self._found: dict[Wanted, list[Problem]] = {}

    def of(self, chunks: tuple[Chunks, ...]) -> Problem:
        """Return the problem with these chunks, which was found before."""
        found = self._made[chunks]
        assert found is not None
        return found

    def found(self, wanted: Wanted) -> list[Problem]:
        """Return those that promise most, of the ways that are looked at."""
        if wanted not in self._found:
            look = _Look(self._problem, wanted, self._made, self._regions)
            self._found[wanted] = _within(self._problem.request, look.best)
        return self._found[wanted]


class _Look:
    """One look for ways to run a function in chunks.

    Args:
        problem: The problem of the function as it is.
        wanted: What is looked for.
        made: The problems that were made before; new ones are added.
        regions: Likewise of regions.
    """

    def __init__(
        self,
        problem: Problem,
        wanted: Wanted,
        made: dict[tuple[Chunks, ...], Problem | None],
        regions: _Regions,
    ) -> None:
        self.problem, self.wanted, self.made, self.regions = problem, wanted, made, regions
        # Where none fits, the least is told.
        self.temporaries = max(wanted.temporaries, SETTINGS.least_chunk)
        most = SETTINGS.chunk_equations // (len(problem.function.traced.program.eqns) + 1)
        self.left = min(max(most, 1), SETTINGS.chunked_problems)
        self.most_in_turn = compiler_on(problem.platform).most_in_turn
        self.cheap = (1 + SETTINGS.chunks_worth) * problem.cost
        self.found: dict[tuple[Chunks, ...], tuple[float, Problem]] = {}

    def best(self) -> list[Problem]:
        """Return the problems that promise most."""
        of_loss = whole_loss_chunks(self.problem, self.temporaries)
        if self.wanted.whole_loss:
            self._at((each,) for each in of_loss)
        even = [each for each in self.found.values() if each[1].chunks_are_equal]
        # Where chunks of the whole loss may fit, no region need hold all of it.
        is_lean = not self.found or any(self._may_fit(each) for _, each in self.found.values())
        may_be_all = not of_loss or self.wanted.leanest or not is_lean
        of_regions = self._around(self.problem, may_be_all)
        urgent = self.wanted.is_urgent
        if even:
            cost, one = min(even, key=lambda each: each[0])
            if cost > self.cheap and (urgent or cost < of_regions):
                # A loop more is not worth a gain that the model may be wrong about.
                worth = (1 - SETTINGS.chunks_worth) * cost
                self._around(one, may_be_all=False, without=worth)
                if not self.wanted.leanest:
                    self.found = {
                        chunks: each
                        for chunks, each in self.found.items()
                        if each[0] <= worth or not _is_inside(chunks, one.chunks)
                    }
        ways = [each for _, each in sorted(self.found.values(), key=lambda each: each[0])]
        if self.wanted.leanest:
            ways = sorted(ways, key=_least_peak)[:1] + ways
        different: dict[Any, Problem] = {}
        for each in ways:
            different.setdefault(tuple(map(_about, each.solved)), each)
        kept = SETTINGS.chunked_problems_kept if urgent else SETTINGS.compiled_in_chunks
        return list(different.values())[:kept]

    def _may_fit(self, problem: Problem) -> bool:
        """Whether an option is predicted not to need many times what there is."""
        most = SETTINGS.leaner_slack
        return any(_needed(problem, each, self.temporaries) <= most for each in problem.solved)

    def _at(self, ways: Iterable[tuple[Chunks, ...]], best: float = math.inf) -> float:
        """The least cost of some ways, or of one before; looked at as long as it falls."""
        for chunks in ways:
            if chunks not in self.found:
                if not self.left:
                    break
                if chunks not in self.made:
                    self.made[chunks] = _in_chunks(self.problem, chunks)
                new = self.made[chunks]
                if new is None:
                    continue
                self.left -= 1
                self.found[chunks] = _promised_cost(new, self.temporaries), new
            cost, _ = self.found[chunks]
            if cost > best:
                break
            best = cost
        return best

    def _around(self, values_of: Problem, may_be_all: bool, without: float = math.inf) -> float:
        """The least cost with regions around wide values, then around narrower ones too.

        Args:
            values_of: The problem whose values they are.
            may_be_all: Whether a region may hold all that is dear.
            without: The cost of that problem, if they are to be better.
        """
        best, best_regions = without, list[RegionInside]()
        goes_on = self.wanted.is_urgent and math.isinf(without)
        for regions in self._distinct_regions(values_of, may_be_all):
            cost = math.inf
            # A loop, which is slower, needs less memory at times.
            for most_in_turn in dict.fromkeys((self.most_in_turn, *self.wanted.leanest * [0])):
                ways = _fewer_bytes(regions, self.temporaries, most_in_turn)
                at = self._at(((*values_of.chunks, *each) for each in ways), without)
                cost = min(cost, at)
            is_worse = best <= cost < math.inf and not goes_on
            if cost < best:
                best, best_regions = cost, regions
            if is_worse or best <= self.cheap or not self.left:
                break
        if self.wanted.leanest:
            smallest = _in_chunks_of(best_regions, SETTINGS.least_chunk, self.most_in_turn)
            self._at([(*values_of.chunks, *smallest)] if smallest else [])
        return best

    def _distinct_regions(self, problem: Problem, may_be_all: bool) -> Iterator[list[RegionInside]]:
        """The regions around values wider than some bytes each, where they are others."""
        found: set[Any] = set()
        regions: list[RegionInside] = []
        narrows = self._widths(problem)
        for narrow, around in itertools.product(narrows, sorted({False, may_be_all})):
            if around and not any(x.path for x in regions):
                continue  # there are no others with nothing inside of loops
            regions = self._regions_of(problem, narrow, around)
            is_all = any(self._is_all(problem, each) for each in regions)
            key = tuple((x.path, x.region.equations) for x in regions)
            if regions and key not in found and (may_be_all or not is_all):
                found.add(key)
                yield regions

    def _widths(self, problem: Problem) -> list[int]:
        """Powers of two bytes: the first is the largest that the values of any region exceed."""
        widths = _powers_of_two(self.temporaries, 1, self.temporaries.bit_length())
        exceeded = (i for i, each in enumerate(widths) if self._regions_of(problem, each, False))
        first = next(exceeded, 0)
        return widths[first : first + SETTINGS.chunk_widths]

    def _regions_of(self, problem: Problem, narrow: int, around: bool) -> list[RegionInside]:
        """The regions around values wider than some bytes; found once."""
        key = problem.chunks, narrow, around
        if key not in self.regions:
            self.regions[key] = regions_within(
                problem.function.traced.program,
                narrow,
                around,
                problem.split,
                problem.devices,
                perturbed=problem.function.perturbed,
            )
        return self.regions[key]

    def _is_all(self, problem: Problem, each: RegionInside) -> bool:
        """Whether a region holds all of a loss; where all may be in chunks, all that is dear."""
        if each.path:
            return False
        if self.wanted.whole_loss:
            return holds_all(problem, each.program, each.region.equations)
        return holds_all_products(each.program, each.region.equations)


def _is_inside(chunks: tuple[Chunks, ...], around: tuple[Chunks, ...]) -> bool:
    """Whether some regions in chunks are others with more inside of them."""
    return len(chunks) > len(around) and chunks[: len(around)] == around


def _about(option: Option) -> tuple[int, int]:
    """Peak and cost of an option, to a percent."""
    return round(100 * math.log(option.peak + 1)), round(100 * math.log(option.cost + 1))


def _fewer_bytes(
    regions: Sequence[RegionInside], temporaries: int, most_in_turn: int
) -> Iterator[tuple[Chunks, ...]]:
    """Regions with fewer and fewer bytes a chunk; those that need no more stay whole."""
    before = None
    for most_bytes in _powers_of_two(temporaries, 2, SETTINGS.chunk_sizes):
        chunks = _in_chunks_of(regions, most_bytes, most_in_turn)
        if chunks and chunks != before:
            yield chunks
        before = chunks


def _powers_of_two(most: int, step: int, count: int) -> list[int]:
    """So many powers of two, from about half of the most on down; none too small.

    >>> _powers_of_two(100_000_000, 2, 5), _powers_of_two(100_000, 1, 7)
    ([67108864, 16777216, 4194304, 1048576, 262144], [65536, 32768, 16384])
    """
    first = round(math.log2(most / 2))
    sizes = (2 ** max(first - step * i, 0) for i in range(count))
    return list(dict.fromkeys(max(size, SETTINGS.least_chunk) for size in sizes))


def _in_chunks_of(
    regions: Sequence[RegionInside], most_bytes: int, most_in_turn: int
) -> tuple[Chunks, ...]:
    return tuple(filter(None, (each.chunks(most_bytes, most_in_turn) for each in regions)))


def _least_peak(problem: Problem) -> int:
    return min(each.peak for each in problem.solved)


def _in_chunks(problem: Problem, chunks: tuple[Chunks, ...]) -> Problem | None:
    """The problem of the function with regions in chunks; see `in_chunks_of_loss`."""
    first, *inside = chunks
    if first.is_whole_loss:
        return in_chunks_of_loss(problem, first, tuple(inside))
    request, signature = problem.request, problem.function.signature
    fn = chunked_function(request.fn, chunks, request.respect_checkpoints, signature)
    new = dataclasses.replace(request, fn=fn)
    return Problem.of(new).with_chunks(chunks)


def _within[T](request: Request, make: Callable[[], T]) -> T:
    """What is made where a larger program calls the function, if it is in one.

    There its arguments lie on the mesh of a `shard_map`, say.
    """
    if request.program is None:
        return make()
    found: list[T] = []

    @named_like(request.fn)
    def recorded(*args: Any) -> Any:
        if not found:
            found.append(make())
        return request.fn(*args)

    request.program(recorded)
    return found[0]


def _needed(problem: Problem, option: Option, temporaries: int) -> float:
    """What an option is predicted to need, over the bytes that there are for temporaries."""
    factor = math.exp(compiler_on(problem.platform).peak_errors.mean) / problem.parts
    return option.peak * factor / temporaries


def _promised_cost(problem: Problem, temporaries: int) -> float:
    """The cost of the best option, of which one that is predicted not to fit may fit all the same.

    It counts as the dearer, the more it needs.
    """

    def cost(option: Option) -> float:
        needed = max(_needed(problem, option, temporaries), 1.0)
        return problem.predicted_cost(option) * needed**SETTINGS.too_large_costs

    return min(map(cost, problem.solved))
