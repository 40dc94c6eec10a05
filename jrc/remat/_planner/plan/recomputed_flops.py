"""FLOPs that a program runs beside those of the baseline under a decision."""

from collections.abc import Sequence
from typing import Any

from jrc._jaxpr import Program, equation_flops, inner_program, loop_parts
from jrc._tree import is_floating
from jrc.remat._planner.plan.decision import Branches, Construct, Loop, Stages, bodies


def recomputed_flops(program: Program, decision: Stages) -> int:
    """Return the FLOPs of all that a decision recomputes, in loops as often as it runs.

    A loop in segments, or in parts, also adds up gradients of what all of its steps read, segment
    by segment; and of what it goes over, part by part.

    Args:
        program: The program.
        decision: Its decision.
    """
    total = 0
    for region in decision.regions:
        total += sum(program.flops[program.steps[k]] for k in region.recomputed)
        total += sum(_inside(program, loop) for loop in region.inside)
    for stage in decision.stages:
        if isinstance(stage, Construct):
            total += _inside(program, stage)
    return total


def _inside(program: Program, stage: Construct) -> int:
    found = [
        0 if body.decision is None else recomputed_flops(body.program, body.decision) * body.times
        for body in bodies(program, stage)
    ]
    if isinstance(stage, Branches):
        return max(found)
    if isinstance(stage, Loop):
        return sum(found) + _of_segments(program.eqns[program.steps[stage.equation]], stage)
    return sum(found)


def _of_segments(eqn: Any, loop: Loop) -> int:
    start, count = loop_parts(eqn)
    step = sum(map(equation_flops, inner_program(eqn).eqns))
    constants, gone_over = _entries(eqn.invars[:start]), _entries(eqn.invars[start + count :])
    segments = sum((step * (part.steps // part.segments) + constants) * part.segments
                 for part in loop.parts if part.segments)  # fmt: skip
    return segments + (len(loop.parts) - 1) * (constants + gone_over)


def _entries(atoms: Sequence[Any]) -> int:
    """Entries of the floating arrays."""
    return sum(x.aval.size for x in atoms if is_floating(x.aval))
