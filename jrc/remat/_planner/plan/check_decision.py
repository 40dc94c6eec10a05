"""Checks of a decision that was read from JSON: the text may have been edited.

>>> from jrc.remat._planner.plan.decision import Stage
>>> check_decision(Decision((Stage((0, 1)), Stage((1, 2)))), 3)
Traceback (most recent call last):
ValueError: decision, stage 1: equation 1 is listed twice
"""

from collections.abc import Sequence
from typing import Any

from jrc._jaxpr import INPUT, Program, can_rebuild, inner_programs, primitive_name, repeats
from jrc._validate import is_whole
from jrc.remat._planner.plan.decision import AS_WRITTEN, Decision, Stage, ranges_text
from jrc.remat._planner.program.trace import inlined_program


def check_decision(decision: Decision, count: int | None, where: str = "decision") -> set[int]:
    """Raise a `ValueError` if a decision cannot belong to a program of `count` equations.

    Args:
        decision: The decision, as it was read.
        count: The number of equations; `None` if it is not known, as for inner programs.
        where: The name of the decision in errors.

    Returns:
        The equations that the decision lists.
    """
    if not _is_index(decision.chunks):
        raise ValueError(f"{where}: chunks must be a whole number >= 0, got {decision.chunks!r}")
    if not isinstance(decision.as_written, bool):
        raise ValueError(f"{where}: as_written must be a bool, got {decision.as_written!r}")
    if decision.as_written and decision != AS_WRITTEN or decision.as_written and count is None:
        raise ValueError(f"{where}: what runs as written has no stages, and is a whole function")
    for k, branch in enumerate(decision.branches):
        if branch is not None:
            check_decision(branch, None, f"{where}, branch {k}")
    for k, (steps, part) in enumerate(decision.parts):
        if not is_whole(steps) or steps < 1 or decision.stages or part.parts:
            raise ValueError(f"{where}, part {k}: a part has steps, and a decision for the body")
        check_decision(part, None, f"{where}, part {k}")
    _check_offloaded(decision, where)
    seen: set[int] = set()
    for k, stage in enumerate(decision.stages):
        name = f"{where}, stage {k}"
        _check_positions(stage, seen, count, name)
        _check_saved(stage, name)
        if stage.inside is not None:
            check_decision(stage.inside, None, f"{name}, inside")
        seen.update(stage.positions)
    return seen


def left_out(decision: Decision | None, count: int) -> str:
    """Return, as ranges, the equations that a decision does not list: no result needs them."""
    stages = decision.stages if decision else ()
    found = {p for stage in stages for p in stage.positions}
    if decision is None or decision.as_written:
        return ""
    return ranges_text([p for p in range(count) if p not in found])


def check_decision_fits(decision: Decision, program: Program, who: str) -> None:
    """Raise a `ValueError` if a decision does not fit a program."""
    try:
        _check_inside(decision, program, "decision")
    except ValueError as error:
        raise ValueError(
            f"{who}: the decision of this plan does not fit its program: {error}. The plan was "
            "edited; make it again with jrc.plan(fn, *args, budget=...)."
        ) from None


def _check_inside(decision: Decision, program: Program, where: str) -> None:
    steps, live = program.steps, program.live()
    if decision.as_written:
        return
    if decision.branches or decision.parts:
        what = (
            "branches of what is no lax.cond" if decision.branches else "parts of what is no loop"
        )
        raise ValueError(f"{where}: {what}")
    found = check_decision(decision, len(steps), where)
    missing = [k for k, p in enumerate(steps) if live[p] and k not in found]
    if missing:
        raise ValueError(f"{where}: equation {missing[0]}, which the result needs, is missing")
    _check_offloaded_inputs(decision, program, where)
    number = {p: k for k, p in enumerate(steps)}
    done: set[int | None] = {None}
    for n, stage in enumerate(decision.stages):
        name = f"{where}, stage {n}"
        done.update(stage.positions)
        for k in stage.positions:
            operands = [number.get(program.producer[v]) for v in program.sources(steps[k])]
            early = [each for each in operands if each not in done]
            if early:
                raise ValueError(
                    f"{name}: equation {k} runs before equation {early[0]}, which makes its operand"
                )
        for k, i in stage.saved:
            made = len(program.eqns[steps[k]].outvars)
            if i >= made:
                raise ValueError(
                    f"{name}: result {i} of equation {k} is saved, which has {made} results"
                )
        if stage.inside is not None:
            _check_construct(stage.inside, program.eqns[steps[stage.positions[0]]], name)


def _check_construct(inside: Decision, eqn: Any, where: str) -> None:
    kind = primitive_name(eqn)
    if not can_rebuild(eqn) or (inside.chunks and kind != "scan"):
        raise ValueError(f"{where}: the program inside of a {kind} cannot be planned so")
    if inside.chunks > repeats(eqn):
        raise ValueError(f"{where}: {inside.chunks} chunks of a loop of {repeats(eqn)} steps")
    programs = inner_programs(eqn)
    if kind == "cond":
        _check_branches(inside, programs, where)
        return
    if kind == "scan" and inside.parts:
        total = sum(steps for steps, _ in inside.parts)
        if total != repeats(eqn):
            raise ValueError(f"{where}: parts of {total} steps of a loop of {repeats(eqn)}")
        for k, (steps, part) in enumerate(inside.parts):
            if part.chunks > steps:
                raise ValueError(f"{where}, part {k}: {part.chunks} chunks of {steps} steps")
            _check_inside(part, inlined_program(programs[0]), f"{where}, part {k}")
        return
    for jaxpr in programs:
        _check_inside(inside, inlined_program(jaxpr), f"{where}, inside")


def _check_branches(inside: Decision, programs: Sequence[Any], where: str) -> None:
    if len(inside.branches) != len(programs) or inside.stages:
        raise ValueError(f"{where}: a cond of {len(programs)} branches needs as many decisions")
    for k, (branch, jaxpr) in enumerate(zip(inside.branches, programs, strict=True)):
        if branch is not None:
            _check_inside(branch, inlined_program(jaxpr), f"{where}, branch {k}")


def _check_positions(stage: Stage, seen: set[int], count: int | None, where: str) -> None:
    found = stage.positions
    twice = sorted(seen.intersection(found))
    if twice:
        raise ValueError(f"{where}: equation {twice[0]} is listed twice")
    if found != tuple(sorted(set(found))):
        raise ValueError(f"{where}: its equations must be in program order, each once")
    if count is not None and found and found[-1] >= count:
        raise ValueError(f"{where}: equation {found[-1]} does not exist; the program has {count}")
    strange = sorted(set(stage.recomputed).difference(found))
    if strange:
        raise ValueError(f"{where}: equation {strange[0]} is recomputed, but not in the stage")
    if stage.inside is not None and len(found) != 1:
        raise ValueError(f"{where}: a stage with an inner decision must be one equation")
    if not isinstance(stage.by_name, bool):
        raise ValueError(f"{where}: by_name must be a bool, got {stage.by_name!r}")
    if not stage.region and (stage.saved or stage.recomputed):
        raise ValueError(f"{where}: a stage outside of all regions saves nothing by name")


def _check_saved(stage: Stage, where: str) -> None:
    inside = set(stage.positions)
    for p, i in stage.saved:
        if not (_is_index(p) and _is_index(i)) or p not in inside:
            raise ValueError(
                f"{where}: result {i!r} of equation {p!r} is saved, but not made in the stage"
            )


def _check_offloaded(decision: Decision, where: str) -> None:
    regions = [stage for stage in decision.stages if stage.region]
    saved = {place for stage in regions for place in stage.saved}
    for k, (p, i) in enumerate(decision.offloaded):
        is_place = is_whole(p) and _is_index(i)
        if not is_place or not ((p == INPUT and regions) or (p, i) in saved):
            raise ValueError(
                f"{where}: result {i!r} of equation {p!r} is offloaded, but no region saves it"
            )
        if (p, i) in decision.offloaded[:k]:
            raise ValueError(f"{where}: result {i} of equation {p} is offloaded twice")


def _check_offloaded_inputs(decision: Decision, program: Program, where: str) -> None:
    """Raise if an input is offloaded that does not exist, or that no region reads."""
    regions = [stage for stage in decision.stages if stage.region]
    steps = (program.steps[k] for each in regions for k in each.positions)
    read = {v for p in steps for v in program.sources(p)}
    for i in (i for p, i in decision.offloaded if p == INPUT):
        if i >= len(program.jaxpr.invars):
            raise ValueError(f"{where}: input {i} is offloaded, and does not exist")
        if program.jaxpr.invars[i] not in read:
            raise ValueError(f"{where}: input {i} is offloaded, but no region reads it")


def _is_index(number: Any) -> bool:
    return is_whole(number) and number >= 0
