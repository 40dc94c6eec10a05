"""A decision: which values of a program are saved, and which equations are recomputed.

The decision for a program is a sequence of stages: a range of equations that is one recomputed
region, a range that is left to JAX, or one construct (a loop, a conditional, a `shard_map`) with
decisions for the programs inside of it. `bodies` and `walk` go through a program and its decision
together.

>>> Stages((Region((0, 1, 2), saved=((1, 0),)),)).stage_of(2)
Region(equations=(0, 1, 2), saved=((1, 0),), recomputed=(), by_name=True, inside=())
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from jrc._jaxpr import Program, inlined_program, inner_program, inner_programs, repeats
from jrc.remat._planner.costs.compilers import WithoutBarrier

Place = tuple[int, int]
"""A value: the number of the equation that makes it, and which of its results it is."""


@dataclasses.dataclass(frozen=True)
class Region:
    """Equations that run as one recomputed region.

    Attributes:
        equations: In program order, numbered without casts to vary over a mesh axis.
        saved: Their results that are saved for the backward pass.
        recomputed: The equations that the backward pass runs again.
        by_name: Whether the region saves these results under a name, and reads them in its own
            backward pass. Else it is a bare `jax.checkpoint`, and other regions read them.
        inside: The loops among its equations whose steps run under a decision, so that the region
            need not hold what all of their steps save.
    """

    equations: tuple[int, ...]
    saved: tuple[Place, ...] = ()
    recomputed: tuple[int, ...] = ()
    by_name: bool = True
    inside: "tuple[Loop, ...]" = ()


@dataclasses.dataclass(frozen=True)
class LeftToJax:
    """Equations of which JAX saves what their derivatives read."""

    equations: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class LoopPart:
    """Steps of a loop that run under one decision.

    Attributes:
        steps: How many steps.
        body: The decision for each step.
        segments: Into how many segments the steps are cut. Only the carries between segments are
            saved, and each segment is recomputed in turn; 0 is no cut.
    """

    steps: int
    body: "Stages"
    segments: int = 0


@dataclasses.dataclass(frozen=True)
class Loop:
    """A `lax.scan`, in one part or several, in the order in which they run."""

    equation: int
    parts: tuple[LoopPart, ...]

    @property
    def equations(self) -> tuple[int, ...]:
        """The loop's equation."""
        return (self.equation,)


def has_equal_steps(stage: Any) -> bool:
    """Return whether this is a loop all of whose steps run under one decision, in one segment."""
    return isinstance(stage, Loop) and len(stage.parts) == 1 and not stage.parts[0].segments


@dataclasses.dataclass(frozen=True)
class Branches:
    """A `lax.cond` or `lax.switch`: a decision for each branch; `None` leaves a branch to JAX."""

    equation: int
    branches: "tuple[Stages | None, ...]"

    @property
    def equations(self) -> tuple[int, ...]:
        """The conditional's equation."""
        return (self.equation,)


@dataclasses.dataclass(frozen=True)
class Mapped:
    """A `shard_map`: a decision for the program that every device runs."""

    equation: int
    body: "Stages"

    @property
    def equations(self) -> tuple[int, ...]:
        """The `shard_map`'s equation."""
        return (self.equation,)


Construct = Loop | Branches | Mapped
Stage = Region | LeftToJax | Construct


@dataclasses.dataclass(frozen=True)
class Stages:
    """The decision for a program.

    Attributes:
        stages: Its equations, in the order in which they run.
        offloaded: The saved values that lie in the host's memory until the backward pass reads
            them; -1 is the equation of what the program is given.
        without_barrier: Which saved values stand behind no barrier. On accelerators a barrier keeps
            readers from being fused; on a CPU XLA needs less memory with it.
        in_order: Whether the gradients of what a stage reads are all computed before the stage in
            front of it is differentiated.
    """

    stages: tuple[Stage, ...]
    offloaded: tuple[Place, ...] = ()
    without_barrier: WithoutBarrier = "none"
    in_order: bool = False

    @property
    def regions(self) -> tuple[Region, ...]:
        """The recomputed regions among the stages."""
        return tuple(stage for stage in self.stages if isinstance(stage, Region))

    @property
    def recomputes(self) -> bool:
        """Whether anything is recomputed, at any depth."""
        return any(map(_recomputes, self.stages))

    def stage_of(self, equation: int) -> Stage | None:
        """Return the stage that an equation is part of."""
        return next((stage for stage in self.stages if equation in stage.equations), None)


def _recomputes(stage: Stage) -> bool:
    match stage:
        case Region():
            return bool(stage.recomputed)
        case Loop():
            return any(part.segments or part.body.recomputes for part in stage.parts)
        case Branches():
            return any(branch is not None and branch.recomputes for branch in stage.branches)
        case Mapped():
            return stage.body.recomputes
        case _:
            return False


@dataclasses.dataclass(frozen=True)
class Baseline:
    """Nothing is recomputed: the function without `jax.checkpoint` regions."""


@dataclasses.dataclass(frozen=True)
class AsWritten:
    """The function runs under the `jax.checkpoint` regions that its user wrote."""


Decision = Stages | Baseline | AsWritten


@dataclasses.dataclass(frozen=True)
class Body:
    """A program inside of a construct, and the decision for it.

    Attributes:
        program: The program.
        decision: Its decision; `None` leaves it to JAX.
        times: How often it runs each time that the construct does.
    """

    program: Program
    decision: Stages | None
    times: int = 1


def bodies(program: Program, stage: Stage) -> list[Body]:
    """Return the programs inside of a stage with their decisions; none of what is no construct."""
    match stage:
        case Loop():
            inner = inlined_program(inner_program(_equation(program, stage)))
            return [Body(inner, part.body, part.steps) for part in stage.parts]
        case Branches():
            pairs = zip(inner_programs(_equation(program, stage)), stage.branches, strict=True)
            return [Body(inlined_program(jaxpr), branch) for jaxpr, branch in pairs]
        case Mapped():
            eqn = _equation(program, stage)
            return [Body(inlined_program(inner_program(eqn)), stage.body, repeats(eqn))]
        case _:
            return []


def walk(
    program: Program,
    decision: Stages,
    times: int = 1,
    enter: Callable[[Program, Construct], bool] = lambda program, construct: True,
) -> Iterator[tuple[Program, Stages, int]]:
    """Yield a program with its decision and how often it runs, then all programs inside.

    Args:
        program: The program.
        decision: Its decision.
        times: How often it runs.
        enter: Whether the programs inside of a construct are visited.
    """
    yield program, decision, times
    for stage in decision.stages:
        if isinstance(stage, Construct) and enter(program, stage):
            for body in bodies(program, stage):
                if body.decision is not None:
                    yield from walk(body.program, body.decision, times * body.times, enter)


def _equation(program: Program, stage: Construct) -> Any:
    return program.eqns[program.steps[stage.equation]]


def variable_at(program: Program, place: Place) -> Any:
    """Return the variable that a decision calls by its equation and number.

    Equation -1 is the inputs, then the constants.
    """
    k, i = place
    return (program.given if k < 0 else program.eqns[program.steps[k]].outvars)[i]
