"""Planning inside of a loop: plans of its body, the same in chunks, and parts of two plans."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jrc._jaxpr import Program, is_variable, loop_parts, nbytes, repeats
from jrc._tree import is_floating
from jrc.remat._gradient.activity import active_variables
from jrc.remat._planner.costs.cost_graph import CostGraph
from jrc.remat._planner.plan.decision import Decision
from jrc.remat._planner.program.trace import inlined_program
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._planner.solver.save_sets import distinct, policy_sets
from jrc.remat._planner.solver.solver import (
    IN_CHUNKS,
    NOTHING_SAVED,
    InnerOption,
    ParetoPoint,
    solve,
    spread_evenly,
)
from jrc.remat._planner.solver.stages import decision_of, decision_of_blocks, recomputed_flops

Front = Callable[..., Any]


def loop_options(front: Front, program: Program, p: int, active: set[Any]) -> list[InnerOption]:
    """Return the options of a `scan`, the leanest first, and behind them what a person would do.

    Args:
        front: `inner_programs.pareto_front`.
        program: The program that contains it.
        p: Its position.
        active: The variables that a derivative flows through.
    """
    eqn = program.eqns[p]
    body, length = inlined_program(eqn.params["jaxpr"]), repeats(eqn)
    start, count = loop_parts(eqn)
    end = start + count
    carried = body.jaxpr.invars[start:end]
    perturbed = _perturbed_in_loop(body, eqn, active, start, end)
    wanted = [x for x in body.jaxpr.outvars if is_variable(x) and is_floating(x.aval)]
    graph, _, points = front(body, perturbed, wanted, length, carried)
    options = [
        option_of(graph, point, length)
        for point in spread_evenly(points, graph.flops, SETTINGS.inner_options)
    ]
    loop = _Loop(
        length,
        graph.flops,
        carry=sum(nbytes(v.aval) for v in carried),
        copied=_copied_bytes(eqn, end, active),
        added=sum(x.aval.size for x in _gradients(eqn, end, active)),
        constants=sum(v.aval.size for v in perturbed.intersection(body.jaxpr.invars[:start])),
    )
    by_hand: list[InnerOption] = []
    if not any(node.runs_once for node in graph.nodes if node.position >= 0):
        options += _chunked(options, loop)
        by_hand = _every_step_recomputed(body, graph, length)
        by_hand += _steps_and_chunks_recomputed(by_hand, loop)
    options = _undominated(options)
    return _undominated(options + _in_parts(options, loop)) + by_hand


def option_of(graph: CostGraph, point: ParetoPoint, times: int = 1) -> InnerOption:
    """Return a point of the program inside of a construct, which runs so often, as an option."""
    return InnerOption(
        point.saved,
        point.peak,
        point.flops * times,
        decision_of(graph, point),
        host=point.host,
        waits=point.waits * times,
    )


def _perturbed_in_loop(body: Program, eqn: Any, active: set[Any], start: int, end: int) -> set[Any]:
    """The inputs of a loop's body that are differentiated in some step."""
    inputs = body.jaxpr.invars
    perturbed = {
        v for v, x in zip(inputs, eqn.invars, strict=True) if is_variable(x) and x in active
    }
    while True:
        reached = active_variables(body, perturbed, body.jaxpr.outvars) | perturbed
        pairs = zip(inputs[start:end], body.jaxpr.outvars[: end - start], strict=True)
        more = {v for v, x in pairs if is_variable(x) and x in reached}
        if more <= perturbed:
            return perturbed
        perturbed |= more


def _every_step_recomputed(body: Program, graph: CostGraph, length: int) -> list[InnerOption]:
    """The body of a loop under one `jax.checkpoint`, with policies that a person would try."""
    sets = {NOTHING_SAVED: frozenset[int]()} | policy_sets(body, graph)
    return [
        way
        for name, values in distinct(sets).items()
        for way in _under_checkpoint(graph, length, values, name)
    ]


def _under_checkpoint(
    graph: CostGraph, length: int, values: frozenset[int], name: str
) -> list[InnerOption]:
    """The body of a loop under one `jax.checkpoint`, which saves some values beside the carries."""
    carried = frozenset(v for node in graph.nodes if node.position < 0 for v in node.makes)
    found = []
    for point in solve(graph, None, length, saved=carried | values)[:1]:
        body = decision_of_blocks(graph, point, [range(len(graph.nodes))], by_name=bool(values))
        flops = recomputed_flops(graph, body) * length
        if flops:
            found.append(InnerOption(point.saved, point.peak, flops, body, by_hand=name))
    return found


def _steps_and_chunks_recomputed(
    by_hand: Sequence[InnerOption], loop: "_Loop"
) -> list[InnerOption]:
    """The loop in the chunks of the least peak, each chunk and each step under `jax.checkpoint`."""
    steps = [each for each in by_hand if each.by_hand == NOTHING_SAVED]
    chunked = sorted(_chunked(steps, loop), key=lambda each: each.peak)[:1]
    return [
        dataclasses.replace(each, by_hand=IN_CHUNKS)
        for each in chunked
        if each.peak < steps[0].peak
    ]


@dataclasses.dataclass(frozen=True)
class _Loop:
    """A loop.

    Attributes:
        length: Its steps.
        flops: FLOPs of one step.
        carry: Bytes of its carries.
        copied: Bytes of the copies of its inputs and results if it runs in parts.
        added: Entries of the inputs' gradients that are added up if it runs in parts.
        constants: Entries of what all steps read, whose gradients are added up.
    """

    length: int
    flops: int
    carry: int
    copied: int
    added: int
    constants: int


def _copied_bytes(eqn: Any, end: int, active: set[Any]) -> int:
    """Bytes of slices of what a loop goes over, of their gradients, and of its joined results."""
    _, carried = loop_parts(eqn)
    sliced = [x for x in eqn.invars[end:] if is_variable(x)]
    gradients = _gradients(eqn, end, active)
    return sum(nbytes(x.aval) for x in (*sliced, *gradients, *eqn.outvars[carried:]))


def _gradients(eqn: Any, end: int, active: set[Any]) -> list[Any]:
    """What a loop goes over that is differentiated."""
    return [x for x in eqn.invars[end:] if is_variable(x) and x in active]


def _chunked(options: Sequence[InnerOption], loop: _Loop) -> list[InnerOption]:
    """The options in chunks: carries between chunks are saved, each chunk is recomputed.

    Gradients of constants are added up chunk by chunk too.
    """
    found = []
    for option in (each for each in options if not each.host):
        each = option.saved / loop.length
        work = option.peak - option.saved
        best = math.sqrt(loop.length * each / max(loop.carry, 1))
        for chunks in {_near_divisor(loop.length, scale * best) for scale in SETTINGS.chunk_scales}:
            if not 1 < chunks < loop.length:
                continue
            # Steps that are left over run last, and are not recomputed.
            size, rest = divmod(loop.length, chunks)
            saved = int(chunks * loop.carry + rest * each)
            peak = int(chunks * loop.carry + max(size, rest) * each + work)
            flops = option.flops + (loop.flops * size + loop.constants) * chunks
            body = dataclasses.replace(option.body, chunks=chunks)
            found.append(InnerOption(saved, peak, flops, body))
    return found


def _in_parts(options: Sequence[InnerOption], loop: _Loop) -> list[InnerOption]:
    """Options whose first steps run under one option, and the last steps under a richer one.

    The price between two options that lie far apart then follows the bytes in a line. What the last
    steps save is freed before the first are differentiated.
    """
    found = []
    for lean, rich in itertools.pairwise(_convex_front(options)):
        price = (lean.flops - rich.flops) / (3 * loop.flops * loop.length)
        count = min(int(price / SETTINGS.part_price), SETTINGS.most_parts, loop.length)
        for i in range(1, count):
            steps = _whole_chunks(lean.body, loop.length, round(loop.length * i / count))
            if 0 < steps < loop.length:
                found.append(_split(lean, rich, loop, steps))
    return found


def _whole_chunks(body: Decision, length: int, steps: int) -> int:
    """The number of steps, rounded to whole chunks."""
    size = length // body.chunks if body.chunks else 1
    return round(steps / size) * size


def _split(lean: InnerOption, rich: InnerOption, loop: _Loop, steps: int) -> InnerOption:
    """The first steps under one option, the rest under another."""
    rest = loop.length - steps
    first, last = _for_steps(lean, loop, steps), _for_steps(rich, loop, rest)
    copied = loop.carry + loop.copied
    saved = first.saved + last.saved + copied
    peak = max(first.saved + last.peak + copied, first.peak + copied)
    flops = first.flops + last.flops + loop.constants + loop.added
    parts = ((steps, first.body), (rest, last.body))
    return InnerOption(
        saved,
        peak,
        flops,
        Decision((), parts=parts),
        host=first.host + last.host,
        waits=first.waits + last.waits,
    )


def _for_steps(option: InnerOption, loop: _Loop, steps: int) -> InnerOption:
    """The option for fewer steps of a loop, in chunks of nearly the same size."""
    share, work = steps / loop.length, option.peak - option.saved
    if not option.body.chunks:
        saved = int(option.saved * share)
        flops, host, waits = (int(n * share) for n in (option.flops, option.host, option.waits))
        return InnerOption(saved, saved + work, flops, option.body, host=host, waits=waits)
    size = loop.length // option.body.chunks
    chunks = max(steps // size, 1)
    saved = chunks * loop.carry
    plain = option.flops - (loop.flops * size + loop.constants) * option.body.chunks
    # Where they are no whole number of those chunks, each chunk has more steps.
    flops = int(plain * share) + (loop.flops * (steps // chunks) + loop.constants) * chunks
    body = dataclasses.replace(option.body, chunks=chunks)
    return InnerOption(saved, saved + work, flops, body)


def _convex_front(options: Sequence[InnerOption]) -> list[InnerOption]:
    """The options with falling FLOPs per byte, the leanest first."""
    front: list[InnerOption] = []
    for option in sorted(options, key=lambda each: (each.peak, each.flops)):
        if front and option.flops >= front[-1].flops:
            continue
        while len(front) > 1 and _slope(front[-2], option) <= _slope(front[-2], front[-1]):
            front.pop()
        front.append(option)
    return front


def _slope(one: InnerOption, other: InnerOption) -> float:
    return (other.flops - one.flops) / max(other.peak - one.peak, 1)


def _near_divisor(length: int, target: float) -> int:
    """The divisor nearest to a number by ratio; the rounded number where all are far."""
    target = min(max(target, 1.0), float(length))
    small = [d for d in range(1, math.isqrt(length) + 1) if length % d == 0]
    divisors = [*small, *(length // d for d in reversed(small))]
    best = min(divisors, key=lambda d: abs(math.log(d / target)))
    return best if 0.5 < best / target < 2 else max(1, round(target))


def _undominated(options: Sequence[InnerOption]) -> list[InnerOption]:
    """The options that no other beats in peak, saved bytes, FLOPs and bytes on the host."""
    front: list[InnerOption] = []
    for option in sorted(options, key=lambda each: (each.peak, each.flops, each.saved)):
        if not any(_is_as_good(other, option) for other in front):
            front.append(option)
    return front


def _is_as_good(one: InnerOption, other: InnerOption) -> bool:
    """Whether an option of no larger peak needs no more of all else either."""
    return one.flops <= other.flops and one.saved <= other.saved and one.host <= other.host
