"""The candidates: a fixed row of plans, from the leanest to nothing recomputed.

The row depends on the function alone, never on a budget.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from jrc._jaxpr import Program, is_variable, nbytes
from jrc.remat._gradient.residuals import Residuals
from jrc.remat._planner.costs.cost_graph import CostGraph, CostNode
from jrc.remat._planner.costs.host_link import HostLink
from jrc.remat._planner.costs.memory_model import (
    bytes_left_to_jax,
    kept_by_xla,
    lent_bytes,
    should_try_plain_first,
    unfusable_bytes,
)
from jrc.remat._planner.costs.platform_memory import CPU, PlatformMemory
from jrc.remat._planner.plan.decision import Decision
from jrc.remat._planner.plan.saved_by_plan import NOTHING_RECOMPUTED
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._planner.solver.hand_made import hand_made
from jrc.remat._planner.solver.inner_programs import front_of, pareto_front
from jrc.remat._planner.solver.solver import ParetoPoint, solve, spread_evenly
from jrc.remat._planner.solver.stages import decision_of


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One plan of the row.

    Attributes:
        decision: What is saved; `None` leaves it to JAX, and nothing is recomputed.
        temporaries: Predicted bytes besides arguments and results.
        saved: Predicted bytes that are saved after the forward pass.
        recomputed: FLOPs that are recomputed.
        name: What it is called if a person would try it by hand.
        host: Predicted bytes that are saved in the host's memory.
        waits: What the device could compute while it waits for copies to and from there, in FLOPs.
    """

    decision: Decision | None
    temporaries: int
    saved: int
    recomputed: int
    name: str = ""
    host: int = 0
    waits: int = 0

    @property
    def cost(self) -> int:
        """The time that it takes longer than nothing recomputed, as FLOPs."""
        return self.recomputed + self.waits


@dataclasses.dataclass(frozen=True)
class CandidateRow:
    """The candidates of a program.

    Attributes:
        candidates: The leanest first; nothing recomputed last.
        by_hand: What a person would try by hand and the model finds dominated.
        plain_first: Whether the last may need less than the first, and is compiled before it.
        widest: The equation whose differentiation alone needs most bytes, by position.
    """

    candidates: tuple[Candidate, ...]
    by_hand: tuple[Candidate, ...]
    plain_first: bool
    widest: int | None


def candidate_row(
    program: Program,
    perturbed: Iterable[Any],
    residuals: Residuals,
    compilations: int,
    memory: PlatformMemory = CPU,
    link: HostLink | None = None,
) -> CandidateRow:
    """Return the candidates of a program.

    Args:
        program: The program; its first result is differentiated.
        perturbed: Its inputs that it is differentiated by. Their cotangents are results.
        residuals: What JAX saves where nothing is recomputed.
        compilations: How many candidates a search may compile; each more doubles their number.
        memory: What is assumed of the platform.
        link: What copies to the host cost, where values may be moved there.
    """
    perturbed = list(perturbed)
    results = [nbytes(v.aval) for v in perturbed]
    graph, options, points = pareto_front(
        program, perturbed, program.jaxpr.outvars[:1], memory=memory, link=link
    )
    left_to_jax = residuals.bytes
    if not options:
        kept = solve(graph, saved=kept_by_xla(graph, graph.nodes))
        left_to_jax = bytes_left_to_jax(residuals.bytes, kept[-1].peak) if kept else left_to_jax
    plain = Candidate(None, left_to_jax, residuals.bytes, 0, NOTHING_RECOMPUTED)
    if not points:
        return CandidateRow((plain,), (), False, _widest_equation(program, graph))

    def candidate(point: ParetoPoint, decision: Decision, name: str = "") -> Candidate:
        saved = (graph.sizes[v] for v in point.values)
        temporaries = max(point.peak - lent_bytes(results, saved), 0)
        recomputed = point.flops - point.waits
        return Candidate(
            decision, temporaries, point.saved, recomputed, name, point.host, point.waits
        )

    base = 3 * graph.flops
    points = worthwhile_points(
        [point for point in points if point.peak < plain.temporaries or point is points[0]], base
    )
    solid = unfusable_bytes(residuals)
    leanest = candidate(points[0], decision_of(graph, points[0]))
    compilations -= should_try_plain_first(leanest.temporaries, solid)
    lean = [
        candidate(point, decision_of(graph, point))
        for point in spread_evenly(points, base, max(1, 2**compilations - 2))
        if point.values or point.flops or point.bodies
    ]
    on_device = {k: [each for each in some if not each.host] for k, some in options.items()}
    by_hand = [
        candidate(way.point, way.decision, way.name) for way in hand_made(program, graph, on_device)
    ]
    if any(each.host for each in lean):
        # What moves less than the model says must not hide what was reached without it.
        for point in front_of(graph, on_device)[:1]:
            by_hand.append(
                candidate(point, decision_of(graph, point), "leanest with nothing moved")
            )
    row = (*lean, plain)
    plain_first = should_try_plain_first(row[0].temporaries, solid)
    return CandidateRow(row, tuple(by_hand), plain_first, _widest_equation(program, graph))


def worthwhile_points(points: Sequence[ParetoPoint], base: int) -> list[ParetoPoint]:
    """Return the points that are worth their price in FLOPs; the leanest stays.

    Dropped are points that pay more than `highest_price` for what they gain, and points closer
    than `least_gain`, because XLA's bytes do not follow the prediction so closely. Where bytes cost
    next to nothing, several steps are merged into one.

    Args:
        points: The front, the leanest first.
        base: FLOPs of the gradient, which a price is a share of.
    """
    found = last = [points[-1]]
    for point in reversed(points[:-1]):
        gain = _relative_gain(found[-1], point)
        price = (point.flops - found[-1].flops) / base
        merges = _relative_gain(last[0], point) < SETTINGS.merged_gain
        if price <= SETTINGS.low_price * gain and merges:
            found = [*found[:-1], point]
        elif point is points[0] or (
            price <= SETTINGS.highest_price * gain and gain > SETTINGS.least_gain
        ):
            last = found[-1:]
            found = [*found, point]
    return found[::-1]


def _relative_gain(one: ParetoPoint, other: ParetoPoint) -> float:
    """The logarithm of the ratio of peaks."""
    return math.log(max(one.peak, 1) / max(other.peak, 1))


def _widest_equation(program: Program, graph: CostGraph) -> int | None:
    def width(node: CostNode) -> int:
        eqn = program.eqns[program.steps[node.position]]
        own = sum(nbytes(x.aval) for x in (*eqn.invars, *eqn.outvars) if is_variable(x))
        return own * (node.active and bool(node.flops))

    nodes = [node for node in graph.nodes if node.position >= 0]
    return program.steps[max(nodes, key=width).position] if nodes else None
