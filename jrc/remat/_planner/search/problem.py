"""A planning problem: a function's gradient, the options for it, and what they cost."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jrc._errors import name_of, named_like
from jrc._jaxpr import (
    SplitValues,
    flops,
    inline_marked,
    live_equations,
    nbytes,
)
from jrc._targets import Chip, chip_named, chip_of_device
from jrc._tree import is_traced
from jrc._validate import check_flag
from jrc.remat._chunks.chunks import Chunks, chunks_text
from jrc.remat._gradient.arguments import (
    Arguments,
    arguments_of,
    call_checked,
    refuse_tracers,
)
from jrc.remat._gradient.compiled_memory import bytes_on_device, device_of
from jrc.remat._gradient.opaque import Opaque, Path, opaque_equations
from jrc.remat._gradient.recompute_count import reruns
from jrc.remat._gradient.residuals import residuals_and_gradient
from jrc.remat._planner.costs.compilers import Compiler, compiler_on
from jrc.remat._planner.costs.cost_graph import CostGraph
from jrc.remat._planner.costs.cost_unit import CostUnit, FlopUnit, Minimize, TimeUnit
from jrc.remat._planner.costs.sharding import is_in_parts, most_parts, split_values
from jrc.remat._planner.costs.widest_equation import widest_equation
from jrc.remat._planner.plan.decision import AsWritten, Baseline, Stages
from jrc.remat._planner.plan.recomputed_flops import recomputed_flops
from jrc.remat._planner.plan.saved_by_plan import BASELINE, NOTHING_RECOMPUTED
from jrc.remat._planner.program.signature import signature_of
from jrc.remat._planner.program.trace import traced_for_plan
from jrc.remat._planner.search.gradient import (
    Gradient,
    GradientAlone,
    GradientInside,
    PlannedFunction,
)
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._planner.solver.as_written import as_written_option
from jrc.remat._planner.solver.baseline import baseline_bytes
from jrc.remat._planner.solver.constructs import front_of, pareto_front
from jrc.remat._planner.solver.fewest_flops import with_fewest_flops
from jrc.remat._planner.solver.manual import manual_options
from jrc.remat._planner.solver.option import Option, spread_options
from jrc.remat._time.seconds import Device, known_device


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be planned, as the public functions pass it on.

    Attributes:
        fn: The function.
        args: Its arguments, or their shapes.
        argnums: The arguments that it is differentiated by.
        has_aux: Whether it returns more than a loss.
        respect_checkpoints: Whether `jax.checkpoint` regions of the function stay regions.
        target: The name of the target that programs are compiled for; empty without one.
        platform: What programs are compiled for, if the arguments do not say it.
        copy_bandwidth: Bytes per second of copies to the host, where saved values may lie there.
        program: The larger program that the function is part of, lowered, with another function in
            the place of this one; `None` if the gradient alone is to fit.
        minimize: What a plan minimises; FLOPs, where nothing is known of the device's rates.
        in_loop: Whether the function is run in a loop: a chunk of the whole loss.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    argnums: int | Sequence[int] = 0
    has_aux: bool = False
    respect_checkpoints: bool = False
    target: str = ""
    platform: str | None = None
    copy_bandwidth: float | None = None
    program: Callable[[Callable[..., Any]], jax.stages.Lowered] | None = None
    minimize: Minimize = "flops"
    in_loop: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A function whose gradient is to fit a budget, and the options for it.

    Attributes:
        request: What is planned.
        function: The function with its program.
        gradient: Its gradient program in the form that is to fit.
        front: The solver's options, the leanest first.
        baseline: The option that recomputes nothing.
        make_manual: Returns manual plans, the leanest first. Of few ways to run a function in
            chunks they are looked at, so that they are made when they are asked for.
        given: Bytes of arguments on one device.
        returned: Bytes of results: the function's and the gradients, which lie as arguments do.
        flops: FLOPs of the baseline's gradient program.
        cost: Its cost.
        recomputed: FLOPs of it that run the forward pass again, as `jrc.explain` counts them:
            inside of opaque functions such as `jrc.recompute_scan`.
        parts: Into how many parts XLA splits temporaries over devices, about; 1 on one device.
        widest: The equation whose differentiation needs most bytes, as a label.
        opaque: The equations that the planner cannot look into, each with its path.
        graphs: The cost graphs of the program and of those inside, by their jaxprs.
        platform: The platform.
        device: The device that programs are compiled for, if its rates are known and seconds count.
        unit: What costs are counted in.
        on_chip: Bytes of temporaries that the compiler keeps in on-chip memory; they are in no
            peak.
        chunks: Regions of the function that run in chunks.
        times: How many times the program runs: the chunks of the whole loss, a share of one for
            a shorter last one.
    """

    request: Request
    function: PlannedFunction
    gradient: Gradient
    front: tuple[Option, ...]
    baseline: Option
    make_manual: Callable[[], tuple[Option, ...]]
    given: int
    returned: int
    flops: int
    cost: int
    recomputed: int
    parts: int
    widest: str
    opaque: tuple[tuple[Path, Opaque], ...]
    graphs: Mapping[Any, CostGraph]
    platform: str
    device: Device | None
    unit: CostUnit
    on_chip: int = 0
    chunks: tuple[Chunks, ...] = ()
    times: float = 1

    @classmethod
    def of(cls, request: Request) -> "Problem":
        """Trace a function and find its options.

        Raises:
            TypeError: If the function does not return a loss, or does not take the arguments.
            ValueError: If nothing of the arguments is differentiated.
        """
        check_flag(request.has_aux, "has_aux")
        check_flag(request.respect_checkpoints, "respect_checkpoints")
        arguments = arguments_of(request.fn, request.args, request.argnums, numbers=True)
        checked = _checked(request.fn, arguments, request.has_aux)
        traced = traced_for_plan(checked, request.args, {}, request.respect_checkpoints)
        if request.program is None:
            refuse_tracers(traced.inputs[: traced.closed], closed_by=arguments.name)
        program = traced.program
        # What a function closes over comes first among the inputs of its program.
        at = tuple(traced.closed + arguments.arrays.index(i) for i in arguments.perturbed)
        signature = signature_of(traced, request.respect_checkpoints)
        function = PlannedFunction(request.fn, traced, signature, at)
        residuals, gradient = residuals_and_gradient(
            traced.plain, [v.aval for v in traced.opened.jaxpr.invars], at
        )
        platform = request.platform or arguments.platform
        parts = most_parts(arguments.of(arguments.inputs), program)
        compiler = compiler_on(platform)
        if parts > 1 or is_in_parts(program):
            compiler = compiler.without_order()
        chip = _chip(request, arguments)
        device = known_device(platform, chip) if chip or request.minimize == "time" else None
        unit = _unit(request, device, compiler)
        perturbed = [program.jaxpr.invars[i] for i in at]
        sizes = dict(zip(program.jaxpr.invars, map(bytes_on_device, traced.inputs), strict=True))
        results = sum(nbytes(x.aval) for x in program.jaxpr.outvars)
        given = sum(sizes[v] for v in program.jaxpr.invars[traced.closed :])
        returned = results + sum(sizes[v] for v in perturbed)
        graphs: dict[Any, CostGraph] = {}
        graph, options, front = pareto_front(
            program,
            perturbed,
            program.jaxpr.outvars[:1],
            compiler=compiler,
            unit=unit,
            copy_bandwidth=request.copy_bandwidth,
            results=[nbytes(v.aval) for v in perturbed],
            graphs=graphs,
        )
        front = spread_options(front, 3 * graph.cost, SETTINGS.options)
        front = with_fewest_flops(program, graph, options, front)
        of_stacks = unit.of_stacked(residuals.stacked)
        of_operations = unit.total(gradient)

        def make_manual() -> tuple[Option, ...]:
            on_device = {k: [each for each in some if not each.host] for k, some in options.items()}
            manual = manual_options(program, graph, on_device)
            if any(each.host for each in front):
                # What moves less than the model says must not hide what was reached without it.
                lean = front_of(graph, on_device, most=1)
                name = "leanest with nothing moved"
                manual += [dataclasses.replace(each, name=name) for each in lean]
            if traced.regions:
                manual.append(as_written_option(traced.written, at, unit, of_operations))
            return tuple(sorted(manual, key=lambda each: (each.peak, each.cost)))

        left_to_jax = baseline_bytes(graph, options, residuals.bytes)
        # An option that recomputes nothing is the baseline, and shows what it needs at most.
        whole = min([left_to_jax, *(each.peak for each in front if not _recomputes(each))])
        opaque = opaque_equations(program, perturbed, program.jaxpr.outvars[:1], regions=True)
        return cls(
            request=request,
            function=function,
            gradient=GradientAlone(function, arguments, request.has_aux)
            if request.program is None
            else GradientInside(function, request.program),
            front=tuple(filter(_recomputes, front)),
            baseline=Option(
                whole, residuals.bytes, of_stacks, Baseline, BASELINE, family="baseline"
            ),
            make_manual=make_manual,
            # XLA counts closed-over arrays as constants of the program, and not as its arguments.
            given=given,
            returned=returned,
            flops=flops(gradient),
            cost=of_operations + of_stacks,
            recomputed=_recomputed_flops(traced.opened.jaxpr, gradient) if opaque else 0,
            parts=parts,
            widest=widest_equation(program, graph),
            opaque=opaque,
            graphs=graphs,
            platform=platform,
            device=device,
            unit=unit,
            on_chip=chip.on_chip_bytes if chip else 0,
        )

    def with_chunks(self, chunks: tuple[Chunks, ...]) -> "Problem":
        """Return this problem, its options those of a function with regions in chunks."""
        marked = functools.partial(dataclasses.replace, chunks=chunks)
        return dataclasses.replace(
            self,
            front=tuple(map(marked, self.front)),
            baseline=marked(self.baseline, name=NOTHING_RECOMPUTED),
            make_manual=lambda: tuple(map(marked, self.manual)),
            chunks=chunks,
        )

    @functools.cached_property
    def manual(self) -> tuple[Option, ...]:
        """Manual plans, the leanest first."""
        return self.make_manual()

    @property
    def solved(self) -> tuple[Option, ...]:
        """The options of the solver, and the baseline."""
        return (*self.front, self.baseline)

    @property
    def options(self) -> tuple[Option, ...]:
        """All options: those of the solver, the baseline, and manual plans."""
        return (*self.solved, *self.manual)

    @property
    def own(self) -> int:
        """Bytes of arguments and results on one device, which every peak has."""
        return self.given + self.returned

    def temporaries(self, option: Option) -> int:
        """Return the bytes of temporaries on one device that count in a peak, as predicted.

        Where more is saved for the backward pass than fits on the chip, all of that lies in device
        memory, but for what follows the last of manual regions: that is read soon.
        """
        size = option.peak // self.parts
        if not self.on_chip:
            return size
        saved = min(option.saved // self.parts, size)
        if option.family == "regions" or saved <= self.on_chip:
            saved = 0
        return max(size - self.on_chip, saved, int(SETTINGS.off_chip_share * size))

    def predicted_cost(self, option: Option) -> int:
        """Return the cost of the whole gradient program of an option, as the model has it."""
        memory = self.unit.of_memory(option.peak / self.parts)
        cost = self.cost - self.baseline.cost + option.cost + memory
        if isinstance(self.unit, TimeUnit) and self._recomputes_chunks:
            cost = int(cost * compiler_on(self.platform).recomputed_chunks)
        return max(1, cost)

    @functools.cached_property
    def _recomputes_chunks(self) -> bool:
        """Whether chunks of a region are recomputed: it computes no gradient beside its sum."""
        nodes = (node for graph in self.graphs.values() for node in graph.nodes)
        regions = sum(not each.is_whole_loss for each in self.chunks)
        return regions > sum(node.working_bytes > 0 for node in nodes)

    def flops_of(self, option: Option) -> int:
        """Return the FLOPs of the gradient program under an option, as they are predicted."""
        if id(option) not in self._flops:
            self._flops[id(option)] = option, self._flops_of(option)
        return self._flops[id(option)][1]

    @functools.cached_property
    def _flops(self) -> dict[int, tuple[Option, int]]:
        """What is known of options, which are asked again for each budget."""
        return {}

    def _flops_of(self, option: Option) -> int:
        match option.decision:
            case Stages():
                program = self.function.traced.program
                return self.flops + int(self.times * recomputed_flops(program, option.decision))
            case AsWritten():
                return self._flops_as_written
            case _:
                return self.flops

    @functools.cached_property
    def _flops_as_written(self) -> int:
        return flops(self.function.gradient(AsWritten()))

    @property
    def _parts_of_loss(self) -> int:
        """In how many parts the whole loss runs in chunks."""
        shards = self.chunks[0].shards if self.chunks and self.chunks[0].is_whole_loss else ()
        return math.prod(each.parts for each in shards)

    @property
    def devices(self) -> int:
        """Over how many devices the program's values are split; that of one chunk is one part."""
        return max(self.parts // self._parts_of_loss, 1)

    @property
    def chunks_are_equal(self) -> bool:
        """Whether no last chunk of the whole loss is shorter: a shorter one has none inside."""
        return self.times / self._parts_of_loss % 1 == 0

    @functools.cached_property
    def split(self) -> SplitValues | None:
        """How devices split the program's values; `None` on one, or where that is not known."""
        traced = self.function.traced
        if self.devices == 1:
            return None
        return split_values(traced.program, traced.inputs, self.function.perturbed)

    @property
    def name(self) -> str:
        """The name of the function."""
        return name_of(self.request.fn)

    def title(self, option: Option) -> str:
        """Return what an option is called in log lines."""
        title = option.name
        if not title:
            title = f"plan {self.front.index(option) + 1} of {len(self.front)}, the leanest first"
        return f"{title}, {chunks_text(self.chunks)}" if self.chunks else title


def _unit(request: Request, device: Device | None, compiler: Compiler) -> CostUnit:
    """What costs are counted in: seconds, if they are asked for and the device is known."""
    if device is not None and request.minimize == "time":
        return TimeUnit(device.rates, compiler, request.in_loop)
    return FlopUnit(SETTINGS.attained_flops * device.rates.products if device else 0.0)


def _chip(request: Request, arguments: Arguments) -> Chip | None:
    device = device_of(arguments.of(arguments.inputs))
    return chip_named(request.target) or chip_of_device(device)


def _recomputed_flops(forward: Any, gradient: Any) -> int:
    """FLOPs of a gradient that run the forward pass again."""
    found = reruns(forward, live_equations(inline_marked(gradient, lambda _: True)))
    return sum(each.flops for each in found)


def _recomputes(option: Option) -> bool:
    """Whether an option recomputes anything, or moves it to the host."""
    return option.stages.recomputes or bool(option.host)


def _checked(fn: Callable[..., Any], arguments: Arguments, has_aux: bool) -> Callable[..., Any]:
    """The function, which raises if it does not return a loss."""

    @named_like(fn)
    def checked(*args: Any) -> Any:
        out = call_checked(fn, args, {})
        arguments.result(out, has_aux)
        loss = out[0] if has_aux else out
        if not is_traced(loss):
            raise TypeError(
                f"`{arguments.name}` must return its loss as a JAX array, got "
                f"{type(loss).__name__}, which depends on nothing. Return jnp.asarray(loss)."
            )
        return out

    return checked
