"""The problems of a function with regions in chunks, those that promise most for a budget.

The function with some regions in chunks is a function like any other: it is traced and solved like
it, and its options stand beside those of the function as it is. Nothing is compiled here. Which
values are wide, and how many bytes a chunk may have, are shares of what a budget leaves for
temporaries. Each set of regions is tried with fewer and fewer bytes a chunk, as long as the
cheapest option that is predicted to fit becomes cheaper. Where a plan without chunks fits, larger
sets are tried under the same condition. Where one is predicted to fit that costs hardly more than
the operations of the baseline, no more are tried.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jrc._errors import named_like
from jrc.remat._chunks.chunks import Chunks
from jrc.remat._chunks.regions_within import RegionInside, regions_within
from jrc.remat._planner.costs.compilers import compiler_on
from jrc.remat._planner.execute.chunked_function import chunked_function
from jrc.remat._planner.program.trace import inlined_program
from jrc.remat._planner.search.problem import Problem, Request
from jrc.remat._planner.search.whole_loss import holds_all, in_chunks_of_loss, whole_loss_chunks
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._planner.solver.option import Option


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What ways to run a function in chunks are looked for.

    Attributes:
        temporaries: Bytes that there are for temporaries.
        whole_loss: Whether the whole loss may run in chunks.
        may_be_all: Whether a region may hold all that is dear, where the whole loss may too.
        is_urgent: Whether nothing fits without chunks. Else only the best so far is gone on with.
    """

    temporaries: int
    whole_loss: bool = True
    may_be_all: bool = False
    is_urgent: bool = True


def problems_in_chunks(problem: Problem, wanted: Wanted) -> list[Problem]:
    """Return the problems of a function with regions in chunks that promise most.

    Args:
        problem: The problem of the function as it is.
        wanted: What is looked for.
    """
    return _within(problem.request, lambda: _problems(problem, wanted))


def _problems(problem: Problem, wanted: Wanted) -> list[Problem]:
    # Where none fits, the least is told.
    temporaries = max(wanted.temporaries, SETTINGS.least_chunk)
    most = max(SETTINGS.chunk_equations // (len(problem.function.traced.program.eqns) + 1), 1)
    most = min(most, SETTINGS.chunked_problems)
    of_loss = whole_loss_chunks(problem, temporaries)
    found: dict[tuple[Chunks, ...], tuple[float, Problem]] = {}
    cheap = (1 + SETTINGS.chunks_worth) * problem.cost

    def look_at(ways: Iterable[tuple[Chunks, ...]]) -> float:
        """The least cost of some ways, which are looked at as long as it falls."""
        best = math.inf
        for chunks in ways:
            if len(found) == most:
                break
            if chunks not in found:
                new = _in_chunks(problem, chunks)
                if new is None:
                    continue
                found[chunks] = _promised_cost(new, temporaries), new
            if found[chunks][0] > best:
                break
            best = found[chunks][0]
        return best

    def look_around(values_of: Problem, may_be_all: bool) -> float:
        """The least cost with regions around wide values, then around narrower ones too."""
        best = math.inf
        for regions in _distinct_regions(values_of, temporaries, may_be_all):
            ways = _fewer_bytes(regions, temporaries, values_of.devices)
            cost = look_at((*values_of.chunks, *each) for each in ways)
            is_worse = best <= cost < math.inf and not wanted.is_urgent
            best = min(best, cost)
            if is_worse or best <= cheap or len(found) == most:
                break
        return best

    if wanted.whole_loss:
        look_at((each,) for each in of_loss)
    even = [each for each in found.values() if each[1].chunks_are_equal]
    # Where each chunk of the whole loss can be planned, no region need hold all of it.
    of_regions = look_around(problem, wanted.may_be_all or not of_loss)
    if even:
        cost, one = min(even, key=lambda each: each[0])
        if cost > cheap and (wanted.is_urgent or cost < of_regions):
            look_around(one, may_be_all=False)
    different: dict[Any, Problem] = {}
    for _, each in sorted(found.values(), key=lambda each: each[0]):
        different.setdefault(tuple(map(_about, each.solved)), each)
    kept = SETTINGS.chunked_problems_kept if wanted.is_urgent else SETTINGS.compiled_in_chunks
    return list(different.values())[:kept]


def _about(option: Option) -> tuple[int, int]:
    """Peak and cost of an option, to a percent."""
    return round(100 * math.log(option.peak + 1)), round(100 * math.log(option.cost + 1))


def _distinct_regions(
    problem: Problem, temporaries: int, may_be_all: bool
) -> Iterator[list[RegionInside]]:
    """The regions around values wider than each share of the bytes, where they are others."""
    found: set[Any] = set()
    program = problem.function.traced.program
    if problem.devices > 1 and problem.split is None:
        return  # slices might be cut across devices
    for share, around in itertools.product(SETTINGS.chunk_shares, sorted({False, may_be_all})):
        narrow = max(int(share * temporaries), SETTINGS.least_chunk) * problem.devices
        regions = regions_within(program, narrow, inlined_program, around, problem.split)
        is_all = any(
            not x.path and holds_all(problem, x.program, x.region.equations) for x in regions
        )
        key = tuple((x.path, x.region.equations) for x in regions)
        if regions and key not in found and (may_be_all or not is_all):
            found.add(key)
            yield regions


def _fewer_bytes(
    regions: Sequence[RegionInside], temporaries: int, devices: int
) -> Iterator[tuple[Chunks, ...]]:
    """Regions with fewer and fewer bytes a chunk; those that need no more stay whole."""
    before = None
    for size in SETTINGS.chunk_sizes:
        most_bytes = max(int(size * temporaries), SETTINGS.least_chunk) * devices
        chunks = tuple(filter(None, (each.chunks(most_bytes) for each in regions)))
        if chunks and chunks != before:
            yield chunks
        before = chunks


def _in_chunks(problem: Problem, chunks: tuple[Chunks, ...]) -> Problem | None:
    """The problem of the function with regions in chunks; see `in_chunks_of_loss`."""
    first, *inside = chunks
    if first.is_whole_loss:
        return in_chunks_of_loss(problem, first, tuple(inside))
    request, digest = problem.request, problem.function.signature.digest
    fn = chunked_function(request.fn, chunks, request.respect_checkpoints, digest)
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


def _promised_cost(problem: Problem, temporaries: int) -> float:
    """The cost of the best option, of which one that is predicted not to fit may fit all the same.

    It counts as the dearer, the more it needs.
    """
    factor = math.exp(compiler_on(problem.platform).peak_errors.mean) / problem.parts

    def cost(option: Option) -> float:
        needed = option.peak * factor / temporaries
        return problem.predicted_cost(option) * max(needed, 1.0) ** SETTINGS.too_large_costs

    return min(map(cost, problem.solved))
