"""The gradient program of a planned function under a decision, lowered.

There are two forms: the gradient alone, and inside of a larger program such as a train step. What
is lowered is the user's own program to the letter.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jrc._errors import named_like
from jrc._jaxpr import evaluate
from jrc.remat._gradient.arguments import Arguments
from jrc.remat._gradient.residuals import residuals_and_gradient
from jrc.remat._planner.execute.apply_decision import apply_decision
from jrc.remat._planner.execute.execute import execute_decision
from jrc.remat._planner.plan.decision import AsWritten, Baseline, Decision
from jrc.remat._planner.program.signature import Signature
from jrc.remat._planner.program.trace import TracedForPlan


class Lowering(NamedTuple):
    """A lowered program, and the jaxpr of the function's value and gradients in it."""

    lowered: jax.stages.Lowered
    gradient: Any


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedFunction:
    """A function, its program, and how both run under a decision.

    Attributes:
        fn: The function.
        traced: Its program.
        signature: The program's fingerprint.
        perturbed: The inputs of the program that it is differentiated by.
    """

    fn: Callable[..., Any]
    traced: TracedForPlan
    signature: Signature
    perturbed: tuple[int, ...]

    def applied(self, decision: Decision) -> Callable[..., Any]:
        """Return the function under a decision."""
        if isinstance(decision, Baseline) and not self.traced.regions:
            return self.fn
        return apply_decision(self.fn, decision, self.signature)

    def gradient(self, decision: Decision) -> Any:
        """Return the jaxpr of value and gradients under a decision."""
        program = self.traced.program
        if isinstance(decision, Baseline):
            run: Callable[..., Any] = self.traced.plain
        elif isinstance(decision, AsWritten):
            run = evaluate(self.traced.written)
        else:
            run = execute_decision(program, decision)
        avals = [v.aval for v in program.jaxpr.invars]
        return residuals_and_gradient(run, avals, self.perturbed)[1]


@dataclasses.dataclass(frozen=True, eq=False)
class GradientAlone:
    """`jit(value_and_grad(fn))`."""

    function: PlannedFunction
    arguments: Arguments
    has_aux: bool

    def lower(self, decision: Decision) -> Lowering:
        """Return the program under a decision, lowered."""
        staged = self.arguments.staged(self.function.applied(decision), self.has_aux)
        return Lowering(staged.lower(), staged.jaxpr)

    def runnable(self, decision: Decision) -> Callable[[], Any]:
        """Return a function that runs the program once; the first call compiles it."""
        program = self.arguments.staged(self.function.applied(decision), self.has_aux)
        compiled = functools.cache(lambda: program.lower().compile())
        args = self.arguments.concrete()
        return lambda: compiled()(*args)


@dataclasses.dataclass(frozen=True, eq=False)
class GradientInside:
    """The gradient of a function inside of a larger program.

    Attributes:
        function: The function.
        program: The larger program, lowered, with another function in the place of this one.
    """

    function: PlannedFunction
    program: Callable[[Callable[..., Any]], jax.stages.Lowered]

    def lower(self, decision: Decision) -> Lowering:
        """Return the larger program under a decision, lowered."""
        found: list[Any] = []
        applied = self.function.applied(decision)

        @named_like(self.function.fn)
        def tracing(*args: Any) -> Any:
            if not found:
                found.append(self.function.gradient(decision))
            return applied(*args)

        lowered = self.program(tracing)
        return Lowering(lowered, found[0])


Gradient = GradientAlone | GradientInside
