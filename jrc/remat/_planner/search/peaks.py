"""What is known of a function's options, peaks and costs: predicted, and compiled once.

All that is known lies in one dictionary, which the searches for all budgets share. Equal programs
are compiled once.
"""

import dataclasses
import hashlib
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jrc._errors import running_name
from jrc._jaxpr import flops
from jrc._text import memory_text
from jrc.remat._planner.costs.compilers import compiler_on
from jrc.remat._planner.costs.cost_unit import TimeUnit
from jrc.remat._planner.costs.error_sizes import ErrorSizes
from jrc.remat._planner.search.chunks import ProblemsInChunks
from jrc.remat._planner.search.compiled_cost import CompiledCost, compiled_cost
from jrc.remat._planner.search.gradient import GradientAlone
from jrc.remat._planner.search.problem import Problem
from jrc.remat._planner.solver.option import Option
from jrc.remat._time.measured import median_seconds, outside_of_traces
from jrc.remat._time.seconds import Seconds

_logger = logging.getLogger("jrc")


@dataclasses.dataclass
class _Known:
    """What is known of an option.

    Attributes:
        program: The fingerprint of its program.
        cost: What its compiled program costs.
        flops: FLOPs of the function's value and gradients.
        measured: Seconds of its program, if it was run.
    """

    program: str = ""
    cost: CompiledCost | None = None
    flops: int = 0
    measured: float | None = None


class Peaks:
    """The peaks of the options of a function: as it is, and with regions in chunks.

    Attributes:
        problem: The problem of the function as it is.
        in_chunks: The problems with regions in chunks.

    Args:
        problem: The problem.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.in_chunks = ProblemsInChunks(problem)
        self._known: dict[Option, _Known] = {}

    def problem_of(self, option: Option) -> Problem:
        """Return the problem that an option is of."""
        return self.in_chunks.of(option.chunks) if option.chunks else self.problem

    @property
    def own(self) -> int:
        """Bytes of arguments and results, which every peak has."""
        return self.problem.own

    @property
    def is_inside(self) -> bool:
        """Whether the function is part of a larger program, of which no more is predicted."""
        return self.problem.request.program is not None

    @property
    def errors(self) -> tuple[ErrorSizes, ErrorSizes]:
        """How far off predicted temporaries and seconds are."""
        compiler = compiler_on(self.problem.platform)
        return compiler.peak_errors, compiler.time_errors

    def predicted(self, option: Option) -> int:
        """Return the peak of an option in bytes, as the solver's model has it."""
        return self.own + self.problem.temporaries(option)

    @property
    def are_costs_exact(self) -> bool:
        """Whether the predicted cost is the true one: FLOPs are counted, seconds are modelled."""
        return not isinstance(self.problem.unit, TimeUnit)

    def predicted_cost(self, option: Option) -> int:
        """Return the cost of the whole gradient program of an option, as the model has it."""
        return self.problem_of(option).predicted_cost(option)

    def compiled_cost(self, option: Option) -> int | None:
        """Return the cost of a compiled option: seconds of its program, where they count.

        `None` where the compiler refused the program, so that nothing is known of them.
        """
        if self.are_costs_exact:
            return self.predicted_cost(option)
        time = self.compiled(option).time
        return None if time is None else max(1, self.problem.unit.of_seconds(time.value))

    def time(self, option: Option) -> Seconds | None:
        """Return the seconds of a compiled option: measured ones, if it was run."""
        measured = self._of(option).measured
        return self.compiled(option).time if measured is None else Seconds(measured, "measured")

    def compiled(self, option: Option) -> CompiledCost:
        """Return what the compiled program of an option costs."""
        known, problem = self._of(option), self.problem_of(option)
        if known.cost is None:
            _logger.info("%s: compiling %s", running_name(), problem.title(option))
            lowering = problem.gradient.lower(option.whole)
            known.program = fingerprint_of(lowering.lowered)
            known.flops = flops(lowering.gradient)
            same = (each.cost for each in self._known.values() if each.program == known.program)
            known.cost = next(filter(None, same), None) or self._compile(lowering.lowered, option)
            peak = memory_text(known.cost.peak)
            _logger.info("%s: %s: %s", running_name(), problem.title(option), peak)
        return known.cost

    def known(self) -> list[tuple[Option, CompiledCost]]:
        """Return the options that were compiled, and what each costs."""
        return [(option, each.cost) for option, each in self._known.items() if each.cost]

    def measured(self, options: Sequence[Option]) -> dict[Option, float]:
        """Run the programs of compiled options, in turns, and return the seconds of each."""
        programs = {}
        for each in options:
            gradient = self.problem_of(each).gradient
            assert isinstance(gradient, GradientAlone)  # a larger program has arguments of its own
            programs[each] = gradient.runnable(each.whole)
        seconds = outside_of_traces(lambda: median_seconds(programs))
        for option, each in seconds.items():
            self._of(option).measured = each
        return seconds

    def flops(self, option: Option) -> int:
        """Return the FLOPs of the gradient program of an option that was compiled."""
        return self._of(option).flops

    def program(self, option: Option) -> str:
        """Return the fingerprint of the program of an option that was compiled."""
        return self._of(option).program

    def programs(self, options: Iterable[Option]) -> int:
        """Return how many different programs these compiled options are."""
        return len({self._of(each).program for each in options})

    def _of(self, option: Option) -> _Known:
        return self._known.setdefault(option, _Known())

    def _compile(self, lowered: jax.stages.Lowered, option: Option) -> CompiledCost:
        problem = self.problem_of(option)
        try:
            given = 0 if self.is_inside else problem.given
            return compiled_cost(
                lowered, problem.platform, given, problem.parts > 1, problem.device
            )
        except jax.errors.JaxRuntimeError as error:
            error.add_note(
                f"jrc: the compiler raised this for `{problem.name}`, candidate "
                f"{problem.title(option)!r}. Another budget or batch leads to other programs."
            )
            raise


def fingerprint_of(lowered: jax.stages.Lowered) -> str:
    """Return a hash of a program without its name; of large constants their shapes alone."""
    module: Any = lowered.compiler_ir("stablehlo")
    _, _, text = module.operation.get_asm(large_elements_limit=1024).partition(" attributes ")
    return hashlib.sha256(text.encode()).hexdigest()
