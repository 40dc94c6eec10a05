"""Checks of a decision that was read from JSON: the text may have been edited.

>>> from jrc.remat._planner.plan.decision import Region
>>> check_decision(Stages((Region((0, 1)), Region((1, 2)))), 3)
Traceback (most recent call last):
ValueError: decision, stage 1: equation 1 is listed twice
"""

from jrc._jaxpr import INPUT, Program, can_rebuild, inner_programs, primitive_name, repeats
from jrc.remat._planner.plan.decision import (
    AsWritten,
    Baseline,
    Branches,
    Construct,
    Decision,
    Loop,
    Mapped,
    Region,
    Stages,
    bodies,
    ranges_text,
)

_PRIMITIVES = {Loop: "scan", Branches: "cond", Mapped: "shard_map"}


def check_decision(decision: Decision, count: int | None = None, where: str = "decision") -> None:
    """Raise a `ValueError` if a decision cannot belong to a program of `count` equations.

    Args:
        decision: The decision, as it was read.
        count: The number of equations; `None` if it is not known, as for inner programs.
        where: The name of the decision in errors.
    """
    if isinstance(decision, Baseline | AsWritten):
        return
    _check_offloaded(decision, where)
    seen: set[int] = set()
    for k, stage in enumerate(decision.stages):
        name = f"{where}, stage {k}"
        found = stage.equations
        twice = sorted(seen.intersection(found))
        if twice:
            raise ValueError(f"{name}: equation {twice[0]} is listed twice")
        if found != tuple(sorted(set(found))):
            raise ValueError(f"{name}: its equations must be in program order, each once")
        if count is not None and found and found[-1] >= count:
            raise ValueError(
                f"{name}: equation {found[-1]} does not exist; the program has {count}"
            )
        seen.update(found)
        match stage:
            case Region():
                _check_region(stage, name)
            case Loop():
                for i, part in enumerate(stage.parts):
                    if part.segments > part.steps:
                        raise ValueError(
                            f"{name}, part {i}: {part.segments} segments of {part.steps} steps"
                        )
                    check_decision(part.body, None, f"{name}, part {i}")
            case Branches():
                for i, branch in enumerate(stage.branches):
                    if branch is not None:
                        check_decision(branch, None, f"{name}, branch {i}")
            case Mapped():
                check_decision(stage.body, None, f"{name}, inside")


def left_out(decision: Decision, count: int) -> str:
    """Return, as ranges, the equations that a decision does not list: no result needs them."""
    if not isinstance(decision, Stages):
        return ""
    found = {p for stage in decision.stages for p in stage.equations}
    return ranges_text([p for p in range(count) if p not in found])


def check_decision_fits(decision: Decision, program: Program) -> None:
    """Raise a `ValueError` if a decision does not fit a program."""
    try:
        if isinstance(decision, Stages):
            _check_inside(decision, program, "decision")
    except ValueError as error:
        raise ValueError(
            f"the plan must fit its own program, got one that does not: {error}. It was "
            "edited; make it again with jrc.plan(fn, *args, budget=...)."
        ) from None


def _check_inside(decision: Stages, program: Program, where: str) -> None:
    steps, live = program.steps, program.live()
    check_decision(decision, len(steps), where)
    found = {p for stage in decision.stages for p in stage.equations}
    missing = [k for k, p in enumerate(steps) if live[p] and k not in found]
    if missing:
        raise ValueError(f"{where}: equation {missing[0]}, which the result needs, is missing")
    _check_offloaded_inputs(decision, program, where)
    number = {p: k for k, p in enumerate(steps)}
    done: set[int | None] = {None}
    for n, stage in enumerate(decision.stages):
        name = f"{where}, stage {n}"
        done.update(stage.equations)
        for k in stage.equations:
            operands = [number.get(program.producer[v]) for v in program.sources(steps[k])]
            early = [each for each in operands if each not in done]
            if early:
                raise ValueError(
                    f"{name}: equation {k} runs before equation {early[0]}, which makes its operand"
                )
        if isinstance(stage, Region):
            _check_results(stage, program, name)
        elif isinstance(stage, Construct):
            _check_construct(stage, program, name)
            for body in bodies(program, stage):
                if body.decision is not None:
                    _check_inside(body.decision, body.program, f"{name}, {body.name}")


def _check_construct(stage: Construct, program: Program, where: str) -> None:
    eqn = program.eqns[program.steps[stage.equation]]
    kind = primitive_name(eqn)
    if not can_rebuild(eqn) or kind != _PRIMITIVES[type(stage)]:
        raise ValueError(f"{where}: the program inside of a {kind} cannot be planned so")
    if isinstance(stage, Loop) and (total := sum(each.steps for each in stage.parts)) != repeats(
        eqn
    ):
        raise ValueError(f"{where}: parts of {total} steps of a loop of {repeats(eqn)}")
    if isinstance(stage, Branches) and len(stage.branches) != len(inner_programs(eqn)):
        count = len(inner_programs(eqn))
        raise ValueError(f"{where}: a cond of {count} branches needs as many decisions")


def _check_region(region: Region, where: str) -> None:
    inside = set(region.equations)
    strange = sorted(set(region.recomputed).difference(inside))
    if strange:
        raise ValueError(f"{where}: equation {strange[0]} is recomputed, but not in the region")
    for p, i in region.saved:
        if p not in inside:
            raise ValueError(
                f"{where}: result {i} of equation {p} is saved, but not made in the region"
            )


def _check_results(region: Region, program: Program, where: str) -> None:
    for k, i in region.saved:
        made = len(program.eqns[program.steps[k]].outvars)
        if i >= made:
            raise ValueError(
                f"{where}: result {i} of equation {k} is saved, which has {made} results"
            )


def _check_offloaded(decision: Stages, where: str) -> None:
    saved = {place for region in decision.regions for place in region.saved}
    for k, (p, i) in enumerate(decision.offloaded):
        if not ((p == INPUT and decision.regions) or (p, i) in saved):
            raise ValueError(
                f"{where}: result {i} of equation {p} is offloaded, but no region saves it"
            )
        if (p, i) in decision.offloaded[:k]:
            raise ValueError(f"{where}: result {i} of equation {p} is offloaded twice")


def _check_offloaded_inputs(decision: Stages, program: Program, where: str) -> None:
    """Raise if an input is offloaded that does not exist, or that no region reads."""
    steps = (program.steps[k] for each in decision.regions for k in each.equations)
    read = {v for p in steps for v in program.sources(p)}
    for i in (i for p, i in decision.offloaded if p == INPUT):
        if i >= len(program.jaxpr.invars):
            raise ValueError(f"{where}: input {i} is offloaded, and does not exist")
        if program.jaxpr.invars[i] not in read:
            raise ValueError(f"{where}: input {i} is offloaded, but no region reads it")
