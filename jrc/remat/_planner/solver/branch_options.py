"""Planning inside of the branches of a `lax.cond` or `lax.switch`.

Each branch has a Pareto front of its own. One option of the construct is a level of bytes: every
branch takes the decision of fewest FLOPs that stays within it, or its leanest. What the branches
save shares memory where the types are equal; JAX is asked how much that is.
"""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from jrc._jaxpr import Program, is_variable, program_key
from jrc.remat._gradient.residuals import residuals_of
from jrc.remat._planner.costs.cost_graph import CostGraph
from jrc.remat._planner.execute.execute import construct
from jrc.remat._planner.plan.decision import Decision
from jrc.remat._planner.program.trace import inlined_program
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._planner.solver.save_sets import policy_sets
from jrc.remat._planner.solver.solver import NOTHING_SAVED, InnerOption, solve, spread_evenly
from jrc.remat._planner.solver.stages import decision_of, decision_of_blocks, recomputed_flops

Front = Callable[..., Any]

# The options of equal constructs of one program, which has as many as it has layers.
_KNOWN: weakref.WeakKeyDictionary[Program, dict[Any, list[InnerOption]]] = (
    weakref.WeakKeyDictionary()
)


@dataclasses.dataclass(frozen=True)
class _Choice:
    """One way to run a branch: peak bytes beside what it saves, all bytes, FLOPs, decision."""

    work: int
    peak: int
    flops: int
    decision: Decision | None


_NOTHING = _Choice(0, 0, 0, None)


@dataclasses.dataclass(frozen=True)
class _Branch:
    """The ways to run a branch, the leanest first, and those of a person: under one checkpoint.

    The latter by what is saved of it; none where something in it must run once.
    """

    choices: list[_Choice]
    by_hand: dict[str, _Choice]


def branch_options(front: Front, program: Program, p: int, active: set[Any]) -> list[InnerOption]:
    """Return the options of a `cond`, the leanest first.

    Args:
        front: `inner_programs.pareto_front`.
        program: The program that contains it.
        p: Its position.
        active: The variables that a derivative flows through.
    """
    eqn = program.eqns[p]
    flags = tuple(is_variable(x) and x in active for x in (*eqn.invars, *eqn.outvars))
    known = _KNOWN.setdefault(program, {})
    key = flags, *map(program_key, eqn.params["branches"])
    if key not in known:
        known[key] = _options(front, program, p, active)
    return known[key]


def _options(front: Front, program: Program, p: int, active: set[Any]) -> list[InnerOption]:
    eqn = program.eqns[p]
    branches = [_branch(front, inlined_program(b), eqn, active) for b in eqn.params["branches"]]
    levels = sorted({choice.peak for branch in branches for choice in branch.choices})
    picked = [levels[round(i)] for i in _spread(len(levels), SETTINGS.branch_levels)]
    combined = dict.fromkeys(
        tuple(_within(branch.choices, level) for branch in branches) for level in picked
    )
    found = [_option(program, p, active, choices) for choices in combined]
    by_hand = [branch.by_hand for branch in branches]
    known: list[list[_Choice]] = []
    for name in dict.fromkeys(name for each in by_hand for name in each) if all(by_hand) else ():
        # A branch that has nothing of what is saved is under a bare `jax.checkpoint`.
        chosen = [each.get(name, each[NOTHING_SAVED]) for each in by_hand]
        if chosen not in known and any(choice.flops for choice in chosen):
            known.append(chosen)
            found.append(_option(program, p, active, chosen, name))
    return found


def _branch(front: Front, branch: Program, eqn: Any, active: set[Any]) -> _Branch:
    pairs = zip(branch.jaxpr.invars, eqn.invars[1:], strict=True)
    perturbed = [v for v, x in pairs if is_variable(x) and x in active]
    results = zip(branch.jaxpr.outvars, eqn.outvars, strict=True)
    wanted = [x for x, v in results if is_variable(x) and v in active]
    graph, _, points = front(branch, perturbed, wanted)
    choices = [
        _Choice(
            point.peak - point.saved,
            point.peak,
            point.flops,
            decision_of(graph, point) if point.flops else None,
        )
        for point in spread_evenly(points, graph.flops, SETTINGS.branch_levels)
    ]
    sets = {NOTHING_SAVED: frozenset[int]()} | policy_sets(branch, graph)
    by_hand = {name: _under_checkpoint(graph, values) for name, values in sets.items()}
    is_free = not any(node.runs_once for node in graph.nodes) or by_hand[NOTHING_SAVED] == _NOTHING
    return _Branch(choices or [_NOTHING], by_hand if is_free else {})


def _under_checkpoint(graph: CostGraph, values: frozenset[int]) -> _Choice:
    """A branch under one `jax.checkpoint`, which saves some values of it."""
    points = solve(graph, saved=values)[:1]
    if not points:
        return _NOTHING
    (point,) = points
    decision = decision_of_blocks(graph, point, [range(len(graph.nodes))], by_name=bool(values))
    flops = recomputed_flops(graph, decision)
    return _Choice(point.peak - point.saved, point.peak, flops, decision if flops else None)


def _spread(count: int, most: int) -> list[float]:
    """Up to `most` indices, evenly spread, both ends among them."""
    steps = min(count, most) - 1
    return [i * (count - 1) / max(steps, 1) for i in range(steps + 1)]


def _within(row: Sequence[_Choice], level: int) -> _Choice:
    fitting = [choice for choice in row if choice.peak <= level]
    return min(fitting, key=lambda choice: (choice.flops, choice.peak)) if fitting else row[0]


def _option(
    program: Program,
    p: int,
    active: set[Any],
    choices: Sequence[_Choice],
    by_hand: str = "",
) -> InnerOption:
    decisions = tuple(choice.decision for choice in choices)
    inside = Decision((), branches=decisions) if any(decisions) else None
    given = program.reads(p)
    perturbed = [i for i, v in enumerate(given) if v in active]
    run = construct(program, p, inside)
    saved = residuals_of(run, [v.aval for v in given], perturbed).bytes
    peak = saved + max(choice.work for choice in choices)
    # One branch runs; the dearest is what a count of FLOPs assumes.
    return InnerOption(saved, peak, max(choice.flops for choice in choices), inside, by_hand)
