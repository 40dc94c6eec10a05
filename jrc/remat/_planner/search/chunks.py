"""The problems of a function with regions in chunks, those that promise most for a budget.

The function with some regions in chunks is a function like any other: it is traced and solved like
it, and its options stand beside those of the function as it is. Nothing is compiled here. Which
values are wide, and how many bytes a chunk may have, are shares of what a budget leaves for
temporaries. Each set of regions is tried with fewer and fewer bytes a chunk, as long as the
cheapest option that is predicted to fit becomes cheaper.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jrc._errors import named_like
from jrc.remat._chunks.rewrite import Chunks, chunks_within
from jrc.remat._planner.costs.compilers import compiler_on
from jrc.remat._planner.execute.chunked_function import chunked_function
from jrc.remat._planner.program.trace import inlined_program
from jrc.remat._planner.search.problem import Problem, Request
from jrc.remat._planner.search.whole_loss import holds_all, in_chunks_of_loss, whole_loss_chunks
from jrc.remat._planner.settings import SETTINGS


class _Promise(NamedTuple):
    """What a problem promises: the cost of what fits, else the least peak; less is better."""

    cost: float
    peak: float


def problems_in_chunks(problem: Problem, room: int, whole_loss: bool = True) -> list[Problem]:
    """Return the problems of a function with regions in chunks that promise most.

    Args:
        problem: The problem of the function as it is.
        room: Bytes for temporaries.
        whole_loss: Whether the whole loss may run in chunks.
    """
    if problem.parts > 1:
        return []  # slices would be cut across devices
    room = max(room, SETTINGS.least_chunk)  # where none fits, the least is told
    most = max(SETTINGS.chunk_equations // (len(problem.function.traced.program.eqns) + 1), 1)
    most = min(most, SETTINGS.chunked_problems)
    found: dict[tuple[Chunks, ...], tuple[_Promise, Problem]] = {}
    ways = [_fewer_bytes(problem, room, share) for share in _distinct_shares(problem, room)]
    if whole_loss:
        ways.insert(0, ((each,) for each in whole_loss_chunks(problem, room)))
    for row in ways:
        best: _Promise | None = None
        for chunks in row:
            if len(found) == most:
                break
            if chunks not in found:
                new = _in_chunks(problem, chunks)
                found[chunks] = _promise(new, room), new
            promise = found[chunks][0]
            if best is not None and best.cost < promise.cost:
                break
            best = promise
    ranked = sorted(found.values(), key=lambda each: each[0])
    return [each for _, each in ranked[: SETTINGS.chunked_problems_kept]]


def _distinct_shares(problem: Problem, room: int) -> list[float]:
    """The largest shares of the room that lead to other regions each."""
    found: dict[Any, float] = {}
    for share in SETTINGS.chunk_shares:
        regions = _chunks(problem, room, share, share)
        # Of the whole loss each chunk is planned.
        is_whole = any(not each.path and holds_all(problem, each.equations) for each in regions)
        if regions and not is_whole:
            found.setdefault(tuple((each.path, each.equations) for each in regions), share)
    return list(found.values())


def _fewer_bytes(problem: Problem, room: int, share: float) -> Iterator[tuple[Chunks, ...]]:
    """The regions of a share, with fewer and fewer bytes a chunk; those of fewer stay whole."""
    before = None
    for size in SETTINGS.chunk_sizes:
        chunks = _chunks(problem, room, share, size)
        if chunks and chunks != before:
            yield chunks
        before = chunks


def _chunks(problem: Problem, room: int, wide: float, share: float) -> tuple[Chunks, ...]:
    """The regions around values wider than one share of the room, in chunks of another one."""
    least = SETTINGS.least_chunk
    narrow, most_bytes = (max(int(each * room), least) for each in (wide, share))
    program = problem.function.traced.program
    return tuple(chunks_within(program, narrow, most_bytes, inlined_program))


def _in_chunks(problem: Problem, chunks: tuple[Chunks, ...]) -> Problem:
    """The problem of the function with regions in chunks."""
    if chunks[0].is_whole_loss:
        return _within(problem.request, lambda: in_chunks_of_loss(problem, chunks[0]))
    request, digest = problem.request, problem.function.signature.digest
    fn = chunked_function(request.fn, chunks, request.respect_checkpoints, digest)
    new = dataclasses.replace(request, fn=fn)
    return _within(request, lambda: Problem.of(new)).with_chunks(chunks)


def _within(request: Request, make: Callable[[], Problem]) -> Problem:
    """What is made where a larger program calls the function, if it is in one.

    There its arguments lie on the mesh of a `shard_map`, say.
    """
    if request.program is None:
        return make()
    found: list[Problem] = []

    @named_like(request.fn)
    def recorded(*args: Any) -> Any:
        if not found:
            found.append(make())
        return request.fn(*args)

    request.program(recorded)
    return found[0]


def _promise(problem: Problem, room: int) -> _Promise:
    factor = math.exp(compiler_on(problem.platform).model_error) / problem.parts
    fitting = (each for each in problem.options if each.peak * factor <= room)
    cost = min(map(problem.predicted_cost, fitting), default=math.inf)
    return _Promise(cost, min(each.peak for each in problem.options))
