"""Planning inside of the branches of a `lax.cond` or `lax.switch`.

Each branch has a Pareto front of its own. One option of the construct is a level of bytes: every
branch takes the decision of fewest FLOPs that stays within it, or its leanest. What the branches
save shares memory where the types are equal; JAX is asked how much that is.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from jrc._jaxpr import Program, inlined_program, inner_programs, is_variable, program_key
from jrc.remat._gradient.residuals import residuals_of
from jrc.remat._planner.execute.execute import construct
from jrc.remat._planner.plan.decision import Branches, LeftToJax, Stages
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._planner.solver.option import Option, made
from jrc.remat._planner.solver.save_sets import NOTHING_SAVED, policy_sets
from jrc.remat._planner.solver.under_checkpoint import under_checkpoint

Front = Callable[..., Any]

# The options of equal constructs of one program, which has as many as it has layers.
_KNOWN: weakref.WeakKeyDictionary[Program, dict[Any, list[Option]]] = weakref.WeakKeyDictionary()

_NOTHING = Option(0, 0, 0)


@dataclasses.dataclass(frozen=True)
class _Branch:
    """The options of a branch, the leanest first, and those under one `jax.checkpoint`, by name.

    There are none of the latter where something in it must run once.
    """

    options: list[Option]
    named: dict[str, Option]


def branch_options(front: Front, program: Program, k: int, active: set[Any]) -> list[Option]:
    """Return the options of a `cond`, the leanest first, and behind them those with a name.

    Args:
        front: `constructs.pareto_front`.
        program: The program that contains it.
        k: Its number in the program.
        active: The variables that a derivative flows through.
    """
    eqn = program.eqns[program.steps[k]]
    flags = tuple(is_variable(x) and x in active for x in (*eqn.invars, *eqn.outvars))
    known = _KNOWN.setdefault(program, {})
    key = flags, *map(program_key, inner_programs(eqn))
    if key not in known:
        known[key] = _options(front, program, k, active)
    return [
        dataclasses.replace(each, make_decision=functools.partial(_at, each, k))
        for each in known[key]
    ]


def _at(option: Option, k: int) -> Branches | LeftToJax:
    """The decision of an option for an equal conditional somewhere else in the program."""
    if isinstance(option.decision, Branches):
        return dataclasses.replace(option.decision, equation=k)
    return LeftToJax((k,))


def _options(front: Front, program: Program, k: int, active: set[Any]) -> list[Option]:
    eqn = program.eqns[program.steps[k]]
    branches = [_branch(front, inlined_program(b), eqn, active) for b in inner_programs(eqn)]
    levels = sorted({option.peak for branch in branches for option in branch.options})
    picked = [levels[round(i)] for i in _spread(len(levels), SETTINGS.branch_levels)]
    combined = dict.fromkeys(
        tuple(_within(branch.options, level) for branch in branches) for level in picked
    )
    found = [_option(program, k, active, chosen) for chosen in combined]
    named = [branch.named for branch in branches]
    known: list[list[Any]] = []
    for name in dict.fromkeys(name for each in named for name in each) if all(named) else ():
        # A branch that has nothing of what is saved is under a bare `jax.checkpoint`.
        chosen = [each.get(name, each[NOTHING_SAVED]) for each in named]
        decisions = [each.decision for each in chosen]
        if decisions not in known and any(option.cost for option in chosen):
            known.append(decisions)
            found.append(_option(program, k, active, chosen, name))
    return found


def _branch(front: Front, branch: Program, eqn: Any, active: set[Any]) -> _Branch:
    pairs = zip(branch.jaxpr.invars, eqn.invars[1:], strict=True)
    perturbed = [v for v, x in pairs if is_variable(x) and x in active]
    results = zip(branch.jaxpr.outvars, eqn.outvars, strict=True)
    wanted = [x for x, v in results if is_variable(x) and v in active]
    graph, _, options = front(branch, perturbed, wanted, most=SETTINGS.branch_levels)
    sets = {NOTHING_SAVED: frozenset[int]()} | policy_sets(branch, graph)
    named = {name: under_checkpoint(graph, values, name) for name, values in sets.items()}
    bare = named[NOTHING_SAVED]
    is_free = bare is None or not any(node.runs_once for node in graph.nodes)
    found = {name: each or dataclasses.replace(_NOTHING, name=name) for name, each in named.items()}
    return _Branch(options or [_NOTHING], found if is_free else {})


def _spread(count: int, most: int) -> list[float]:
    """Up to `most` indices, evenly spread, both ends among them."""
    steps = min(count, most) - 1
    return [i * (count - 1) / max(steps, 1) for i in range(steps + 1)]


def _within(options: Sequence[Option], level: int) -> Option:
    fitting = [option for option in options if option.peak <= level]
    return min(fitting, key=lambda each: (each.cost, each.peak)) if fitting else options[0]


def _option(
    program: Program, k: int, active: set[Any], chosen: Sequence[Option], name: str = ""
) -> Option:
    stages = (each.decision if each.cost else None for each in chosen)
    decisions = tuple(each if isinstance(each, Stages) else None for each in stages)
    decision = Branches(k, decisions) if any(decisions) else LeftToJax((k,))
    given = program.reads(program.steps[k])
    perturbed = [i for i, v in enumerate(given) if v in active]
    run = construct(program, decision)
    saved = residuals_of(run, [v.aval for v in given], perturbed).bytes
    peak = saved + max(each.peak - each.saved for each in chosen)
    # One branch runs; the dearest is what a count of FLOPs assumes.
    return Option(peak, saved, max(each.cost for each in chosen), made(decision), name)
