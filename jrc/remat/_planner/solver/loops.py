"""Planning inside of a loop: plans of its body, the same in segments, and parts of two plans."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jrc._jaxpr import (
    Program,
    inlined_program,
    inner_program,
    is_variable,
    loop_parts,
    nbytes,
    repeats,
)
from jrc._tree import is_floating
from jrc.remat._gradient.activity import active_variables
from jrc.remat._planner.costs.cost_graph import CostGraph
from jrc.remat._planner.costs.cost_unit import CostUnit
from jrc.remat._planner.plan.decision import Loop, LoopPart
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._planner.solver.option import Option, undominated
from jrc.remat._planner.solver.save_sets import IN_SEGMENTS, NOTHING_SAVED, distinct, policy_sets
from jrc.remat._planner.solver.under_checkpoint import under_checkpoint

Front = Callable[..., Any]


def loop_options(front: Front, program: Program, k: int, active: set[Any]) -> list[Option]:
    """Return the options of a `scan`, the leanest first, and behind them those with a name.

    Args:
        front: `constructs.pareto_front`.
        program: The program that contains it.
        k: Its number in the program.
        active: The variables that a derivative flows through.
    """
    eqn = program.eqns[program.steps[k]]
    body, length = inlined_program(inner_program(eqn)), repeats(eqn)
    start, count = loop_parts(eqn)
    end = start + count
    carried = body.jaxpr.invars[start:end]
    perturbed = _perturbed_in_loop(body, eqn, active, start, end)
    wanted = [x for x in body.jaxpr.outvars if is_variable(x) and is_floating(x.aval)]
    graph, _, found = front(body, perturbed, wanted, length, carried, most=SETTINGS.inner_options)
    loop = _Loop(
        k,
        length,
        graph.cost,
        carry=sum(nbytes(v.aval) for v in carried),
        copied=_copied_bytes(eqn, end, active),
        added=_sums(graph.unit, (x.aval for x in _gradients(eqn, end, active))),
        constants=_sums(
            graph.unit, (v.aval for v in perturbed.intersection(body.jaxpr.invars[:start]))
        ),
    )
    options = [loop.whole(each) for each in found]
    named: list[Option] = []
    if not any(node.runs_once for node in graph.nodes if node.position >= 0):
        options += _in_segments(options, loop)
        named = [loop.whole(each) for each in _under_one_checkpoint(body, graph, length)]
        named += _steps_and_segments(named, loop)
    options = undominated(options)
    return undominated(options + _in_parts(options, loop)) + named


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


def _under_one_checkpoint(body: Program, graph: CostGraph, length: int) -> list[Option]:
    """The body of a loop under one `jax.checkpoint`, with each policy that is known by name."""
    sets = {NOTHING_SAVED: frozenset[int]()} | policy_sets(body, graph)
    found = (
        under_checkpoint(graph, values, name, length) for name, values in distinct(sets).items()
    )
    return [each for each in found if each is not None]


def _steps_and_segments(named: Sequence[Option], loop: "_Loop") -> list[Option]:
    """The loop in the segments of the least peak, each one and each step under `jax.checkpoint`."""
    steps = [each for each in named if each.name == NOTHING_SAVED]
    cut = sorted(_in_segments(steps, loop), key=lambda each: each.peak)[:1]
    return [
        dataclasses.replace(each, name=IN_SEGMENTS) for each in cut if each.peak < steps[0].peak
    ]


@dataclasses.dataclass(frozen=True)
class _Loop:
    """A loop.

    Attributes:
        equation: Its number in the program.
        length: Its steps.
        cost: What one step costs.
        carry: Bytes of its carries.
        copied: Bytes of the copies of its inputs and results if it runs in parts.
        added: What it costs to add up the inputs' gradients if it runs in parts.
        constants: What it costs to add up the gradients of what all steps read.
    """

    equation: int
    length: int
    cost: int
    carry: int
    copied: int
    added: int
    constants: int

    def whole(self, body: Option) -> Option:
        """Return an option of the body, for all steps, as an option of the loop."""

        def make_decision() -> Loop:
            return Loop(self.equation, (LoopPart(self.length, body.stages),))

        return dataclasses.replace(body, make_decision=make_decision)


def _sums(unit: CostUnit, avals: Iterable[Any]) -> int:
    """The cost of adding up gradients of these types."""
    return sum(unit.of_sums(aval.size, nbytes(aval)) for aval in avals)


def _part(option: Option) -> LoopPart:
    """The one part of an option that runs all steps alike."""
    assert isinstance(option.decision, Loop)
    (part,) = option.decision.parts
    return part


def _changed(option: Option, equation: int, **changes: Any) -> Loop:
    """The decision of an option that runs all steps alike, with other steps or segments."""
    return Loop(equation, (dataclasses.replace(_part(option), **changes),))


def _copied_bytes(eqn: Any, end: int, active: set[Any]) -> int:
    """Bytes of slices of what a loop goes over, of their gradients, and of its joined results."""
    _, carried = loop_parts(eqn)
    sliced = [x for x in eqn.invars[end:] if is_variable(x)]
    gradients = _gradients(eqn, end, active)
    return sum(nbytes(x.aval) for x in (*sliced, *gradients, *eqn.outvars[carried:]))


def _gradients(eqn: Any, end: int, active: set[Any]) -> list[Any]:
    """What a loop goes over that is differentiated."""
    return [x for x in eqn.invars[end:] if is_variable(x) and x in active]


def _in_segments(options: Sequence[Option], loop: _Loop) -> list[Option]:
    """The options in segments: carries between segments are saved, each segment is recomputed.

    Gradients of constants are added up segment by segment too.
    """
    found = []
    for option in (each for each in options if not each.host):
        each = option.saved / loop.length
        work = option.peak - option.saved
        best = math.sqrt(loop.length * each / max(loop.carry, 1))
        targets = [scale * best for scale in SETTINGS.segment_scales]
        for segments in {_near_divisor(loop.length, target) for target in targets}:
            if not 1 < segments < loop.length:
                continue
            # Steps that are left over run last, and are not recomputed.
            size, rest = divmod(loop.length, segments)
            saved = int(segments * loop.carry + rest * each)
            peak = int(segments * loop.carry + max(size, rest) * each + work)
            cost = option.cost + (loop.cost * size + loop.constants) * segments
            decision = functools.partial(_changed, option, loop.equation, segments=segments)
            found.append(Option(peak, saved, cost, decision))
    return found


def _in_parts(options: Sequence[Option], loop: _Loop) -> list[Option]:
    """Options whose first steps run under one option, and the last steps under a richer one.

    The price between two options that lie far apart then follows the bytes in a line. What the last
    steps save is freed before the first are differentiated.
    """
    found = []
    for lean, rich in itertools.pairwise(_convex_front(options)):
        price = (lean.cost - rich.cost) / (3 * loop.cost * loop.length)
        count = min(int(price / SETTINGS.part_price), SETTINGS.most_parts, loop.length)
        for i in range(1, count):
            steps = _whole_segments(_part(lean), round(loop.length * i / count))
            if 0 < steps < loop.length:
                found.append(_split(lean, rich, loop, steps))
    return found


def _whole_segments(part: LoopPart, steps: int) -> int:
    """The number of steps, rounded to whole segments."""
    size = part.steps // part.segments if part.segments else 1
    return round(steps / size) * size


def _split(lean: Option, rich: Option, loop: _Loop, steps: int) -> Option:
    """The first steps under one option, the rest under another."""
    first, last = _for_steps(lean, loop, steps), _for_steps(rich, loop, loop.length - steps)
    copied = loop.carry + loop.copied
    return Option(
        peak=max(first.saved + last.peak + copied, first.peak + copied),
        saved=first.saved + last.saved + copied,
        cost=first.cost + last.cost + loop.constants + loop.added,
        make_decision=lambda: Loop(loop.equation, (_part(first), _part(last))),
        host=first.host + last.host,
    )


def _for_steps(option: Option, loop: _Loop, steps: int) -> Option:
    """The option for fewer steps of a loop, in segments of nearly the same size."""
    part = _part(option)
    decision = functools.partial(_changed, option, loop.equation, steps=steps)
    share, work = steps / loop.length, option.peak - option.saved
    if not part.segments:
        saved = int(option.saved * share)
        cost, host = (int(n * share) for n in (option.cost, option.host))
        return Option(saved + work, saved, cost, decision, host=host)
    size = loop.length // part.segments
    segments = max(steps // size, 1)
    saved = segments * loop.carry
    plain = option.cost - (loop.cost * size + loop.constants) * part.segments
    # Where they are no whole number of those segments, each segment has more steps.
    cost = int(plain * share) + (loop.cost * (steps // segments) + loop.constants) * segments
    return Option(saved + work, saved, cost, functools.partial(decision, segments=segments))


def _convex_front(options: Sequence[Option]) -> list[Option]:
    """The options with falling cost per byte, the leanest first."""
    front: list[Option] = []
    for option in sorted(options, key=lambda each: (each.peak, each.cost)):
        if front and option.cost >= front[-1].cost:
            continue
        while len(front) > 1 and _slope(front[-2], option) <= _slope(front[-2], front[-1]):
            front.pop()
        front.append(option)
    return front


def _slope(one: Option, other: Option) -> float:
    return (other.cost - one.cost) / max(other.peak - one.peak, 1)


def _near_divisor(length: int, target: float) -> int:
    """The divisor nearest to a number by ratio; the rounded number where all are far."""
    target = min(max(target, 1.0), float(length))
    small = [d for d in range(1, math.isqrt(length) + 1) if length % d == 0]
    divisors = [*small, *(length // d for d in reversed(small))]
    best = min(divisors, key=lambda d: abs(math.log(d / target)))
    return best if 0.5 < best / target < 2 else max(1, round(target))
