"""The whole loss in chunks of examples: what people do by accumulating gradients, planned.

Where the loss is a sum over an axis that all that is dear in the function treats independently
(the examples of a batch, most often), a chunk's value and gradient are computed in one pass of a
loop. What of a chunk is saved and recomputed is the plan's to decide: the problem here is that of
the function of one chunk, and what is compiled is the whole.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence, Set
from fractions import Fraction
from typing import Any

import jax

from jrc._errors import named_like
from jrc._jaxpr import (
    INPUT,
    Program,
    Slices,
    abstract,
    evaluate,
    inner_programs,
    is_variable,
    nbytes,
    slice_program,
    walk,
)
from jrc.remat._chunks.chunks import Chunks
from jrc.remat._chunks.counts import divisors, sizes
from jrc.remat._chunks.form import program_in_form
from jrc.remat._chunks.growth_limits import is_product
from jrc.remat._chunks.region import Region
from jrc.remat._chunks.regions_within import region_of_loss
from jrc.remat._chunks.rewrite import in_chunks, one_chunk_of
from jrc.remat._chunks.sum_and_gradient import Inputs, can_pair, raised
from jrc.remat._gradient.activity import active_variables, differentiated_outside
from jrc.remat._gradient.residuals import residuals_and_gradient, residuals_of
from jrc.remat._planner.costs.build_cost_graph import is_input
from jrc.remat._planner.costs.compilers import Compiler, compiler_on
from jrc.remat._planner.execute.chunked_function import loss_first, plan_of_chunk, planned_chunks
from jrc.remat._planner.plan.decision import Decision
from jrc.remat._planner.program.signature import signature_of
from jrc.remat._planner.program.trace import traced_for_plan
from jrc.remat._planner.search.gradient import PlannedFunction
from jrc.remat._planner.search.problem import Problem
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._planner.solver.option import Option


def whole_loss_chunks(problem: Problem, temporaries: int) -> list[Chunks]:
    """Return the ways to run the whole loss in chunks, the fewest chunks first; none if it cannot.

    Args:
        problem: The problem of the function as it is.
        temporaries: Bytes that there are for temporaries.
    """
    if problem.devices > 1 and problem.split is None:
        return []  # slices might be cut across devices
    program = problem.function.traced.program
    perturbed = problem.function.perturbed
    found = region_of_loss(program, SETTINGS.narrow_in_loss, problem.split, perturbed)
    if found is None or not holds_all(problem, found.program, found.region.equations):
        return []
    program, region = found.program, found.region
    loss = _loss(program, region)
    if loss is None or not _can_be_planned(program, region, perturbed):
        return []
    # Of the leanest option half as much as in proportion may fit; more would be in vain.
    fewest = min(each.peak for each in problem.options) / problem.parts / (2 * temporaries)
    most = min(problem.baseline.peak // problem.parts // SETTINGS.least_chunk, found.slices)
    ways = _counts(found.slices, min(fewest, most), most)
    most_in_turn = compiler_on(problem.platform).most_in_turn
    chunks = (found.in_so_many(n, most_in_turn) for n in ways)
    return [dataclasses.replace(each, loss=loss) for each in chunks]


def _can_be_planned(program: Program, region: Region, perturbed: Sequence[int]) -> bool:
    """Whether a chunk has a gradient, and no data are cut behind something differentiated.

    Nothing plans what is computed in front of the chunks.
    """
    inputs, loss = program.jaxpr.invars, program.jaxpr.outvars[:1]
    active = active_variables(program, [inputs[i] for i in perturbed], loss)
    cut = [v for v, _ in region.slices.given if v in active]
    is_differentiated = cut or not active.isdisjoint(region.slices.whole)
    return bool(is_differentiated) and all(program.producer[v] == INPUT for v in cut)


def _counts(slices: int, fewest: float, most: int) -> list[int]:
    """Numbers of chunks, each about half as many again as the one before; equal ones where near.

    >>> _counts(347, 3.2, 30), _counts(8, 0.5, 8), _counts(13, 2, 9), _counts(3, 2.5, 1)
    ([4, 6, 9, 14, 21, 29], [2, 4, 8], [2, 3, 5, 7], [])
    """
    found: dict[int, None] = {}
    wanted = max(fewest, 2.0)
    while wanted <= most:
        size = math.ceil(slices / wanted)
        count = math.ceil(slices / size)
        even = next(n for n in divisors(slices) if n >= wanted)
        count = even if even <= min(1.5 * count, most) else count
        found[count] = None
        wanted = math.inf if wanted == most else min(1.5 * max(wanted, count), most)
    return list(found)


def holds_all(problem: Problem, program: Program, equations: Sequence[int]) -> bool:
    """Return whether nothing that is dear stays outside of these equations.

    Args:
        problem: The problem of a function.
        program: Its program, with copies of equations perhaps.
        equations: Equations of the program.
    """
    most = SETTINGS.cost_outside_loss * problem.cost / problem.times
    return _cost_outside(problem, program, equations) <= most


def holds_all_products(program: Program, equations: Sequence[int]) -> bool:
    """Return whether no product and no convolution of a program stays outside of these equations.

    Args:
        program: The program.
        equations: Equations of the program.
    """
    outside = set(range(len(program.eqns))).difference(equations)
    return not any(program.live()[p] and _multiplies(program.eqns[p]) for p in outside)


def _multiplies(eqn: Any) -> bool:
    inside = (each for jaxpr in inner_programs(eqn) for each, _ in walk(jaxpr))
    return is_product(eqn) or any(map(is_product, inside))


def _cost_outside(problem: Problem, program: Program, equations: Sequence[int]) -> int:
    """The cost of what a gradient computes outside of a region, about."""
    inside = set(equations)
    live = program.live()
    outside = (p for p in range(len(program.eqns)) if live[p] and p not in inside)
    return 3 * sum(problem.unit.of(program.eqns[p]) for p in outside)


def _loss(program: Program, region: Region) -> int | None:
    """Which of a region's results is differentiated, if that is one, beside which gradients fit."""
    slices, (out, *_) = region.slices, program.jaxpr.outvars
    inputs = Inputs([v.aval for v in slices.whole], [v.aval for v, _ in slices.given])
    read = differentiated_outside(program, region.equations, [out])
    found = [i for i, v in enumerate(region.results) if v in read]
    are_sums = all(v in slices.sums for v in region.results)
    eqns = [program.eqns[p] for p in region.equations]
    pairs = can_pair([v.aval for v in region.results], inputs, eqns)
    return found[0] if len(found) == 1 and are_sums and pairs else None


def in_chunks_of_loss(
    problem: Problem, chunks: Chunks, inside: tuple[Chunks, ...] = ()
) -> Problem | None:
    """Return the problem of one chunk, its costs and peaks those of the whole.

    It is `None` if a last chunk that is shorter has other operators, or other chunks inside: what
    is decided for the others could not be done there.

    Args:
        problem: The problem of the function as it is.
        chunks: One of `whole_loss_chunks`.
        inside: Regions of the program of one chunk that run in chunks themselves.
    """
    program, request = problem.function.traced.program, problem.request
    inputs = [program.jaxpr.invars[i] for i in problem.function.perturbed]
    slices, results, positions, active = one_chunk_of(program, chunks, inputs)
    assert chunks.loss is not None
    loss, respected = positions.index(chunks.loss), request.respect_checkpoints

    def one_of(size: int) -> tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]:
        run, avals = _one_chunk(slices, size, results)
        return named_like(request.fn)(loss_first(run, loss, inside, respected)), avals

    size, _, rest = sizes(slices.parts, chunks.chunks)
    if rest and inside:
        return None
    fn, avals = one_of(size)
    whole: list[Any] = [v for v in slices.whole if v in active]
    cut = [v for v, _ in slices.given]
    inner = Problem.of(
        dataclasses.replace(
            request,
            fn=fn,
            args=avals,
            argnums=tuple(i for i, v in enumerate([*slices.whole, *cut]) if v in active),
            has_aux=True,
            platform=problem.platform,
            program=None,
            in_loop=not chunks.are_in_turn,
        )
    )
    if rest:
        last = traced_for_plan(*one_of(rest), {}, respected)
        if inner.function.signature.other_operators(signature_of(last, respected)):
            return None
    # In a chunk the gradients of what it reads whole lie beside their sums over chunks. Sums that
    # are a gradient of the function, in its own type, are made where that result lies. Sums for
    # what is made in front of the chunks, or read in parts on devices, count apart all the same.
    sums = {v: v.aval.size * raised(v.aval.dtype).itemsize for v in whole}
    differentiated = set(inputs)
    apart = [v for v in whole if v not in differentiated or raised(v.aval.dtype) != v.aval.dtype]
    besides = inner.returned + sum(map(sums.__getitem__, apart))
    besides += sum(nbytes(v.aval) for v in cut if v in active)
    added = problem.unit.of_sums(sum(v.aval.size for v in whole), sum(sums.values()))
    devices = math.prod(each.parts for each in chunks.shards)
    times = slices.parts / size * devices
    outside = _cost_outside(problem, program_in_form(program, chunks.form), chunks.equations)
    front = _bytes_in_front(slices, differentiated, compiler_on(problem.platform))

    def of_all_chunks(option: Option) -> Option:
        peak = devices * (option.peak + besides) + front
        cost = int(option.cost * times)
        return dataclasses.replace(option, peak=peak, cost=cost)

    function = _PlannedChunk(
        fn=request.fn,
        traced=inner.function.traced,
        signature=inner.function.signature,
        perturbed=inner.function.perturbed,
        chunks=(chunks, *inside),
        whole=problem.function,
    )
    return dataclasses.replace(
        inner,
        request=request,
        function=function,
        gradient=dataclasses.replace(problem.gradient, function=function),  # type: ignore[type-var]
        front=tuple(map(of_all_chunks, inner.front)),
        baseline=of_all_chunks(inner.baseline),
        make_manual=lambda: tuple(map(of_all_chunks, inner.manual)),
        given=problem.given,
        returned=problem.returned,
        flops=problem.flops,
        cost=int(times * (inner.cost + added)) + outside,
        recomputed=int(times * inner.recomputed),
        parts=problem.parts,
        times=times,
    ).with_chunks((chunks, *inside))


def _bytes_in_front(slices: Slices, differentiated: Set[Any], compiler: Compiler) -> int:
    """Bytes of what is made in front of the chunks and lies there as long as they run.

    That is what chunks read, and what its derivative saves but for what XLA computes from inputs
    inside of what reads it.
    """
    program = slices.program
    read = [v for v in slices.read if not is_input(program, v)]
    front = program.cut(slices.before, read)
    perturbed = [i for i, v in enumerate(front.invars) if v in differentiated]
    avals = [v.aval for v in front.invars]
    residuals = residuals_of(evaluate(front), avals, perturbed, with_results=True)
    traced, kept = residuals.inlined()
    fused = set(traced.given)
    for eqn in traced.eqns:
        if compiler.fuses(eqn) and fused.issuperset(filter(is_variable, eqn.invars)):
            fused.update(eqn.outvars)
    # A result of the function counts as such. A derivative rule may make a constant a literal.
    made = traced.jaxpr.outvars[len(traced.jaxpr.outvars) - len(read) :]
    pairs = [(v, x) for v, x in zip(read, made, strict=True) if is_variable(x)]
    returned = set(filter(is_variable, program.jaxpr.outvars))
    free = fused.difference(x for _, x in pairs).union(x for v, x in pairs if v in returned)
    return sum(nbytes(x.aval) for x in kept if is_variable(x) and x not in free)


def _one_chunk(
    slices: Slices, size: int, results: Sequence[Any]
) -> tuple[Callable[..., list[Any]], tuple[jax.ShapeDtypeStruct, ...]]:
    """The function of one chunk of so many slices, and the types of its arguments."""
    jaxpr = slice_program(slices, Fraction(size, slices.parts), results)
    return evaluate(jaxpr), tuple(map(abstract, jaxpr.invars))


@dataclasses.dataclass(frozen=True, eq=False)
class _PlannedChunk(PlannedFunction):
    """A function whose loss runs in chunks; program and decisions are those of one of them.

    Attributes:
        chunks: The whole loss, and regions inside of one of its chunks.
        whole: The function as it is.
    """

    chunks: tuple[Chunks, ...]
    whole: PlannedFunction

    def applied(self, decision: Decision) -> Callable[..., Any]:
        """Return the function, each chunk under a decision."""
        return planned_chunks(self.fn, self.chunks, self.whole.signature, decision, self.signature)

    def gradient(self, decision: Decision) -> Any:
        """Return the jaxpr of value and gradients, each chunk under a decision."""
        program = self.whole.traced.program
        loss, *inside = self.chunks
        plan_one = plan_of_chunk(decision, self.signature, inside)
        run = in_chunks(program, [loss], plan_one)
        avals = [v.aval for v in program.jaxpr.invars]
        return residuals_and_gradient(run, avals, self.whole.perturbed)[1]
