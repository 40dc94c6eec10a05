"""A fixed row of plans from the leanest to nothing re-run, and finding the one that fits.

The row depends on the function alone, never on a budget, and the search asks the same rungs in
the same order for every budget until their answers differ. So more budget never leads to
more predicted operations, even where XLA's bytes do not follow the prediction.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jrc._jaxpr import Program, is_variable, nbytes
from jrc.remat._planner.cost_graph import CostGraph
from jrc.remat._planner.decision import Decision
from jrc.remat._planner.inner_programs import pareto_front
from jrc.remat._planner.regions import decision_of
from jrc.remat._planner.solver import ParetoPoint, spread_evenly


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One plan of the row.

    Attributes:
        choice: What is kept; `None` is as JAX keeps it.
        temporaries: Bytes besides arguments and results, as predicted.
        saved: Bytes kept after the forward pass, as predicted.
        again: Operations that are done again.
    """

    decision: Decision | None
    temporaries: int
    saved: int
    recomputed: int


def candidate_plans(
    program: Program, perturbed: Iterable[Any], kept: int, unfusable_bytes: int, asked: int
) -> tuple[CostGraph, list[Candidate]]:
    """The row of plans for a program, the leanest first.

    Args:
        program: The program; its first result is differentiated.
        perturbed: Its inputs by which it is differentiated. Their cotangents are results.
        kept: Bytes that JAX keeps where nothing is re-run.
        unfusable_bytes: Those of them that XLA cannot but keep.
        asked: How many rungs a search may ask; each more halves the steps.
    """
    perturbed = list(perturbed)
    results = sum(nbytes(v.aval) for v in perturbed)
    graph, points = pareto_front(program, perturbed, program.jaxpr.outvars[:1])
    base = 3 * max(1, sum(node.flops for node in graph.nodes))
    points = worthwhile_points([p for p in points if p.peak < kept or p is points[0]], base)
    asked -= should_try_plain_first(max(points[0].peak - results, 0), unfusable_bytes)
    ordered = [
        Candidate(decision_of(graph, point), max(point.peak - results, 0), point.saved, point.flops)
        for point in spread_evenly(points, base, max(1, 2**asked - 2))
        if point.values or point.flops or point.bodies
    ]
    return graph, [*ordered, Candidate(None, kept, kept, 0)]


def should_try_plain_first(least: int, unfusable_bytes: int) -> bool:
    """Whether a plan may need more than nothing re-run does, so that this is to be asked first."""
    return unfusable_bytes < 2 * least


def worthwhile_points(points: Sequence[ParetoPoint], base: int) -> list[ParetoPoint]:
    """The points without those that pay two per cent of operations for less than one of bytes.

    Nor is half a per cent of bytes worth a compilation: XLA's do not follow the prediction so
    closely. Where bytes cost next to nothing a tenth of them is one step. The leanest stays.
    """
    found = last = [points[-1]]
    for point in reversed(points[:-1]):
        memory = _fewer_bytes(found[-1], point)
        price = (point.flops - found[-1].flops) / base
        if price <= 0.05 * memory and _fewer_bytes(last[0], point) < 0.1:
            found = [*found[:-1], point]
        elif point is points[0] or (price <= 2 * memory and memory > 0.005):
            last = found[-1:]
            found = [*found, point]
    return found[::-1]


def _fewer_bytes(one: ParetoPoint, other: ParetoPoint) -> float:
    return math.log(max(one.peak, 1) / max(other.peak, 1))


def highest_fitting(
    fits: Callable[[int], bool], count: int, from_the_top: bool = False, more: bool = False
) -> int | None:
    """Of `count` rungs the highest that fits, found by halving; `None` if none does.

    What is asked next depends on answers alone, so that more room never leads further down. With
    `more` one rung is asked besides: that above the one which did not fit. It leads no further up
    than more room does, as whoever has it knows the answer there.
    """
    low, high = -1, count
    if from_the_top:
        if fits(count - 1):
            return count - 1
        high = count - 1
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    if more and high + 1 < count and fits(high + 1):
        low = high + 1
    return None if low < 0 else low


def widest_equation(program: Program, graph: CostGraph) -> int | None:
    """The equation whose differentiation alone needs most bytes, by position; if there is one."""

    def width(node: Any) -> int:
        eqn = program.eqns[program.steps[node.position]]
        own = sum(nbytes(x.aval) for x in (*eqn.invars, *eqn.outvars) if is_variable(x))
        return own * (node.active and bool(node.flops))

    nodes = [node for node in graph.nodes if node.position >= 0]
    return program.steps[max(nodes, key=width).position] if nodes else None
