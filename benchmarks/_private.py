"""Every private name of jrc that benchmarks use, and the code that knows the planner's inside.

Benchmarks use jrc's public API. What they need beyond it is imported here and nowhere else, so that
a change inside jrc is followed in this file alone.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jrc._jaxpr import Program as Program
from jrc._jaxpr import equation_flops as equation_flops
from jrc._jaxpr import facts_of as facts_of
from jrc._jaxpr import flops as flops
from jrc._jaxpr import inline_all as inline_all
from jrc._jaxpr import inner_programs as inner_programs
from jrc._jaxpr import is_variable as is_variable
from jrc._jaxpr import mark_of as mark_of
from jrc._jaxpr import nbytes as nbytes
from jrc._jaxpr import primitive_name as primitive_name
from jrc._jaxpr import walk as walk
from jrc._targets import abstract_on as abstract_on
from jrc._targets import chip_of_device as chip_of_device
from jrc._targets import target_device_context
from jrc._text import memory_text as memory_text
from jrc._text import network_text as network_text
from jrc._text import seconds_text as seconds_text
from jrc.advice._bandwidth import bytes_per_second as bytes_per_second
from jrc.advice._communication_advice import waiting_seconds as waiting_seconds
from jrc.dgc import Space as Space
from jrc.dgc._schedule import entries_to_send as entries_to_send
from jrc.dgc._selectors.threshold import largest_masks as largest_masks
from jrc.models._image import conv as conv
from jrc.models._layers import cross_entropy as cross_entropy
from jrc.models._layers import dense as dense
from jrc.models._layers import layer_norm as layer_norm
from jrc.outer_optimizers._internal import overlap_of as overlap_of
from jrc.remat import checked_budget as checked_budget
from jrc.remat import memory_needed as memory_needed
from jrc.remat import plan_for_each as plan_for_each
from jrc.remat._compiled.collectives import Collective, collectives
from jrc.remat._compiled.hlo import parse_hlo
from jrc.remat._compiled.hlo_opcodes import opcode_facts
from jrc.remat._compiled.trip_count import trip_count
from jrc.remat._gradient.activity import active_variables
from jrc.remat._gradient.compiled_memory import Memory
from jrc.remat._gradient.compiled_memory import bytes_on_device as bytes_on_device
from jrc.remat._gradient.compiled_memory import compiled_with_memory as compiled_with_memory
from jrc.remat._gradient.compiled_memory import memory_of as memory_of
from jrc.remat._planner.costs.build_cost_graph import build_cost_graph
from jrc.remat._planner.costs.compilers import compiler_on
from jrc.remat._planner.plan.decision import AsWritten, LeftToJax, Stages
from jrc.remat._planner.search.choose import bytes_of, fitting_option, plan_for
from jrc.remat._planner.search.compiled_cost import CompiledCost
from jrc.remat._planner.search.largest_within import largest_within as largest_within
from jrc.remat._planner.search.largest_within import predicted_start as predicted_start
from jrc.remat._planner.search.peaks import Peaks
from jrc.remat._planner.search.problem import Problem, Request
from jrc.remat._planner.search.search import Search
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._planner.solver.option import Option, made
from jrc.remat._planner.solver.solver import solve
from jrc.remat._time.executed import sum_over_executed
from jrc.remat._time.kernel import kernel_of
from jrc.remat._time.measured import in_turns as in_turns
from jrc.remat._time.roofline import kernel_seconds
from jrc.remat._time.seconds import known_device, seconds_on

PRODUCTS = ("dot_general", "conv_general_dilated")
"""The primitives that are matrix products."""


def compiled_step(step: Any, state: Any, batch: Any, platform: str) -> tuple[Any, str]:
    """Return the memory of a train step and its text; no text where the compiler refuses it."""
    memory, compiled = compiled_with_memory(step.lower(state, batch), platform)
    return memory, "" if compiled is None else compiled.as_text()


def collectives_of(text: str, mesh: Any) -> tuple[Collective, ...]:
    """Return the collectives of a compiled program; of an empty text none."""
    return collectives(parse_hlo(text), mesh.shape) if text else ()


def predicted_peak(
    fn: Callable[..., Any], args: tuple[Any, ...], has_aux: bool, platform: str
) -> tuple[int, int]:
    """Return predicted bytes of a gradient on one device: arguments and results; and its peak."""
    problem = Problem.of(Request(fn, args, 0, has_aux, platform=platform))
    written = (each for each in problem.manual if isinstance(each.decision, AsWritten))
    return problem.own, Peaks(problem).predicted(next(written, problem.baseline))


class PlanSearch:
    """Plans of the fewest FLOPs for many budgets: one trace, each candidate compiled once."""

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], has_aux: bool, compilations: int
    ) -> None:
        self._peaks = Peaks(Problem.of(Request(fn, args, 0, has_aux)))
        self._compilations = compilations

    def plan(self, budget: int | float | str, verify: bool = True) -> Any:
        """Return what `jrc.plan` returns."""
        compilations = self._compilations if verify else 0
        return plan_for(self._peaks, checked_budget(budget), compilations)

    def saved_bytes_front(self) -> list["FrontPoint"]:
        """Return the Pareto front by saved bytes and FLOPs of matrix products alone.

        It comes from the planner's own solver on the planner's own graph, with every other cost
        set to zero, as PyTorch's partitioner weighs it.
        """
        function = self._peaks.problem.function
        program = function.traced.program
        active = [v for v in program.jaxpr.invars if jnp.issubdtype(v.aval.dtype, jnp.floating)]
        graph = build_cost_graph(
            program, active_variables(program, active, program.jaxpr.outvars[:1])
        )
        nothing = (0,) * len(graph.sizes)
        nodes = tuple(
            dataclasses.replace(
                node, momentary_bytes=0, operands=(), cost=node.cost * _is_product(program, node)
            )
            for node in graph.nodes
        )
        weighed = dataclasses.replace(
            graph, nodes=nodes, recomputed_bytes=nothing, passing_bytes=nothing
        )
        settings = dataclasses.replace(SETTINGS, labels=2000, tiny_share=0.0)
        return [
            FrontPoint(
                option.saved, option.cost, functools.partial(function.applied, option.decision)
            )
            for option in solve(weighed, settings=settings)
        ]


class CandidateTable:
    """Every candidate of a function, with its cost and its peak, both predicted and compiled."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Any,
        argnums: Any,
        has_aux: bool,
        target: Any,
        minimize: Any = "flops",
    ) -> None:
        args = abstract_on(target, tuple(args)) if target else tuple(args)
        self.target = target
        with target_device_context(target):
            name = target.name if target else ""
            request = Request(fn, args, argnums, has_aux, target=name, minimize=minimize)
            self.problem = Problem.of(request)
        self.peaks = Peaks(self.problem)

    def facts(self) -> dict[str, Any]:
        """Return bytes of arguments and results, the platform, and whether costs are counted."""
        problem, exact = self.problem, self.peaks.are_costs_exact
        return {"own": problem.own, "platform": problem.platform, "are_costs_exact": exact}

    def rows(self, status: Callable[[str], None]) -> list[dict[str, Any]]:
        """Return a row for each candidate; all are compiled."""
        found, options = [], self.problem.options
        with target_device_context(self.target):
            for i, option in enumerate(options):
                status(f"{i + 1} of {len(options)}")
                found.append(
                    {
                        "name": option.name,
                        "family": option.family,
                        "cost": option.cost,
                        "predicted": self.peaks.predicted(option),
                        "compiled": self.peaks.compiled(option).peak,
                        "predicted_cost": self.peaks.predicted_cost(option),
                        "compiled_cost": self.peaks.compiled_cost(option),
                    }
                )
        return found


class KnownPeaks:
    """The peaks and costs of a table of candidates, in the place of a compiler."""

    is_inside = False

    def __init__(self, program: Any) -> None:
        self.own, rows = program["own"], program["rows"]
        self.are_costs_exact = program["are_costs_exact"]
        compiler = compiler_on(program["platform"])
        self.errors = compiler.peak_errors, compiler.time_errors
        self.options = [
            Option(
                row["predicted"] - self.own, 0, row["cost"],
                made(Stages((LeftToJax((i,)),))), row["name"], family=row["family"],
            )
            for i, row in enumerate(rows)
        ]  # fmt: skip
        self._rows = dict(zip(self.options, rows, strict=True))

    def predicted(self, option: Option) -> int:
        """Return the predicted peak."""
        return self._rows[option]["predicted"]

    def predicted_cost(self, option: Option) -> int:
        """Return the predicted cost of the whole program."""
        return self._rows[option]["predicted_cost"]

    def compiled_cost(self, option: Option) -> int | None:
        """Return that of the compiled program."""
        return self._rows[option]["compiled_cost"]

    def compiled(self, option: Option) -> CompiledCost:
        """Return the compiled peak."""
        return CompiledCost(0, 0, self._rows[option]["compiled"], 0)


def program_figures(compiled: Any, target: Any = None) -> dict[str, Any]:
    """Return the seconds that jrc states for a compiled program, and the kernels that it runs.

    Args:
        compiled: The program.
        target: What it is compiled for; by default this machine's first device.

    Returns:
        `stated`, `None` where the device's rates are not known, and `kernels`, those of a loop as
        often as it iterates.
    """
    module, here = parse_hlo(compiled.as_text()), jax.local_devices()[0]
    platform, chip = (
        (target.platform, target.chip) if target else (here.platform, chip_of_device(here))
    )
    device = known_device(platform, chip)
    time = device and seconds_on(module, device, memory_of(compiled).temporaries)
    kernels = sum_over_executed(
        module, lambda around, each: float(kernel_of(module, around, each) is not None)
    )
    return {"stated": time and time.value, "kernels": round(kernels)}


@dataclasses.dataclass(frozen=True)
class StatedKernel:
    """A kernel of a compiled program.

    Attributes:
        name: Its instruction.
        opcode: The instruction's opcode.
        multiplies: Whether it has a matrix product or a convolution.
        times: How often a run of the program runs it.
        seconds: The seconds that jrc states for it, without those of its launch.
    """

    name: str
    opcode: str
    multiplies: bool
    times: int
    seconds: float


def stated_kernels(text: str, target: Any) -> tuple[list[StatedKernel], float]:
    """Return the kernels of a compiled program on a GPU, and the seconds stated for all of it."""
    module, device = parse_hlo(text), known_device(target.platform, target.chip)
    if device is None:
        raise ValueError(f"target must have known rates, got {target.name}.")
    found = []

    def run(computation: Any, times: int) -> None:
        for each in computation.instructions:
            if opcode_facts(each.opcode).runs_computations or each.opcode == "call":
                inside = trip_count(module, computation, each) if each.opcode == "while" else 1
                for other in module.called(each):
                    run(other, times * inside)
            elif kernel := kernel_of(module, computation, each):
                stated = kernel_seconds(kernel, device.rates)
                found.append(
                    StatedKernel(each.name, each.opcode, bool(kernel.products), times, stated)
                )

    run(module.entry, 1)
    return found, seconds_on(module, device).value


def plan_from_table(
    peaks: KnownPeaks, budget: int | float, compilations: int
) -> tuple[int | None, int, int]:
    """Return the row that the search chooses, `None` if it refuses; bytes, and compilations."""
    search = Search(peaks.options, peaks, compilations)
    baseline = next(each for each in peaks.options if each.is_baseline)
    limit = bytes_of(budget, search, baseline)
    found = fitting_option(search, limit, baseline)
    row = None if found is None else peaks.options.index(found)
    return row, limit, len(search.compiled)


class CandidatePeaks:
    """Predicted and compiled peaks of a few candidates of a model, on a target or here."""

    def __init__(self, model: Any, target: Any, cache: Any) -> None:
        args = abstract_on(target, model.args) if target else model.args
        self.fn, self.cache, self.name = model.fn, cache, target.name if target else "cpu"
        name = target.name if target else ""
        self.problem = Problem.of(Request(model.fn, args, 0, model.has_aux, target=name))

    def peaks(self, status: Callable[[str], None]) -> dict[str, dict[str, int]]:
        """Return both peaks of each candidate, in bytes, by what it is called."""
        found, peaks = {}, Peaks(self.problem)
        for way, option in self._some().items():
            status(f"{self.name}: {way}")
            lowered = self.problem.gradient.lower(option.decision).lowered
            compiled = self.cache.of(
                f"{self.name} {lowered.as_text()}",
                lambda lowered=lowered: dataclasses.asdict(
                    memory_needed(lowered, self.problem.platform)
                ),
            )
            found[way] = {
                "predicted": peaks.predicted(option), "compiled": Memory(**compiled).peak
            }  # fmt: skip
        return found

    def _some(self) -> dict[str, Option]:
        problem = self.problem
        found = {"baseline": problem.baseline}
        if front := problem.front:
            found |= {"leanest": front[0], "middle": front[len(front) // 2]}
        named = [each for each in problem.manual if each.name.endswith("recomputed")]
        return found | ({"manual plan": named[0]} if named else {})


@dataclasses.dataclass(frozen=True)
class FrontPoint:
    """A choice of saved values on the Pareto front.

    Attributes:
        saved: Bytes that it saves.
        flops: FLOPs of the matrix products that it recomputes.
        applied: Returns the function with this choice.
    """

    saved: int
    flops: int
    applied: Callable[[], Callable[..., Any]]


def _is_product(program: Any, node: Any) -> bool:
    return primitive_name(program.eqns[program.steps[node.position]]) in PRODUCTS
