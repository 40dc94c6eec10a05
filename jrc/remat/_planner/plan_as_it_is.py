"""The plan of a function that is run and not differentiated: what of it runs in chunks."""

import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jrc._errors import name_of
from jrc._jaxpr import SplitValues, flops, nbytes
from jrc._targets import (
    Target,
    abstract_on,
    checked_target,
    target_device_context,
)
from jrc._text import exact_memory_text
from jrc._tree import aval_of, is_traced, split
from jrc.remat._chunks.chunks import Chunks, chunks_text
from jrc.remat._chunks.region_inside import RegionInside
from jrc.remat._chunks.regions_within import regions_within
from jrc.remat._gradient.arguments import refuse_tracers
from jrc.remat._gradient.compiled_memory import bytes_on_device, device_of
from jrc.remat._planner.budget import (
    Budget,
    BudgetError,
    Share,
    checked_reserve,
    limit_of,
)
from jrc.remat._planner.costs.compilers import compiler_on
from jrc.remat._planner.costs.cost_unit import TimeUnit
from jrc.remat._planner.costs.sharding import most_parts, split_values_of_call
from jrc.remat._planner.execute.chunked_function import chunked_function
from jrc.remat._planner.plan.decision import Baseline
from jrc.remat._planner.plan.plan import Plan
from jrc.remat._planner.plan.plan_candidates import Estimate, PlanCandidate
from jrc.remat._planner.plan.plan_of_process_0 import plan_of_process_0
from jrc.remat._planner.plan.saved_by_plan import BASELINE
from jrc.remat._planner.program.signature import Signature, signature_of
from jrc.remat._planner.program.trace import TracedForPlan, traced_for_plan
from jrc.remat._planner.search.compiled_cost import CompiledCost, compiled_cost
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._time.seconds import device_with_rates


@dataclasses.dataclass(frozen=True)
class _Form:
    """One way to run the function, compiled."""

    chunks: tuple[Chunks, ...]
    signature: Signature
    cost: CompiledCost
    flops: int


class PlannerAsItIs:
    """The plans of one function for any budgets: as it is, and with regions in chunks.

    Args:
        fn: The function.
        args: Its arguments.
        target: As for `plan`.
        reserve: As for `plan`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        target: Target | str | None = None,
        reserve: Any = None,
    ) -> None:
        if not callable(fn):
            raise TypeError(
                f"fn must be a function, got {type(fn).__name__}. Write jrc.plan(fn, *args)."
            )
        refuse_tracers(args)
        self.fn, self.target = fn, checked_target(target)
        self.reserve = checked_reserve(reserve)
        # As arguments of `jax.jit`, and not as constants of the program.
        args = jax.tree.map(lambda x: aval_of(x) if isinstance(x, np.ndarray) else x, args)
        self.args = abstract_on(self.target, args) if self.target else args
        self.arrays, self.skeleton = split(self.args)
        device = device_of(self.arrays)
        self.platform = self.target.platform if self.target else device.platform
        self.device = device_with_rates(self.target, device)
        self.traces: dict[tuple[Chunks, ...], TracedForPlan] = {}
        self.forms: dict[tuple[Chunks, ...], _Form] = {}
        self.regions: dict[int, list[RegionInside]] = {}

    @property
    def traced(self) -> TracedForPlan:
        """The function as it is, with its program."""
        return self._traced(())

    @functools.cached_property
    def signature(self) -> Signature:
        """The signature of its program."""
        return signature_of(self.traced, respect_checkpoints=True)

    @functools.cached_property
    def donated(self) -> tuple[int, ...]:
        """The arrays that it donates."""
        return _donated(self.fn, self.args)

    @functools.cached_property
    def own(self) -> int:
        """Bytes of its arguments and results."""
        results = sum(nbytes(x.aval) for x in self.traced.program.jaxpr.outvars)
        return results + sum(map(bytes_on_device, self.arrays))

    @functools.cached_property
    def parts(self) -> int:
        """Into how many parts its values are split over devices."""
        return most_parts(self.arrays, self.traced.program)

    @functools.cached_property
    def split(self) -> SplitValues | None:
        """How devices split its values; `None` on one, or where that is not known."""
        if self.parts == 1:
            return None
        places = [name.partition("/")[0] for name in self.traced.names]
        counts = [len(list(each)) for _, each in itertools.groupby(places)]
        return split_values_of_call(self.traced.program, self.traced.inputs, counts)

    @property
    def baseline(self) -> _Form:
        """The function as it is."""
        return self._form(())

    def plan(self, budget: int | str | float | None) -> Plan:
        """Return the plan for a budget.

        Raises:
            BudgetError: If nothing fits.
        """
        limit = limit_of(budget, self.target, self.arrays, self.reserve)
        with target_device_context(self.target):
            return plan_of_process_0(lambda: self._find(limit))

    def _find(self, budget: Budget) -> Plan:
        """The function as it is if that fits, else the fastest chunks that do, of a few."""
        forms = [self.baseline]
        whole = self.baseline.cost.peak
        if isinstance(budget, Share):
            budget = int(budget.of_baseline * whole)
        if isinstance(budget, float):
            forms += map(self._of_size, self._sizes)
            least = min(each.cost.peak for each in forms)
            budget = int(least + budget * (whole - least))
        near = [] if whole > budget else [self.baseline, *self._faster()]
        forms += near or self._within(budget)
        fitting = [each for each in forms if each.cost.peak <= budget]
        if not fitting:
            lean = min(forms, key=lambda each: each.cost.peak)
            raise BudgetError(
                f"the least peak that was found of `{name_of(self.fn)}` is "
                f"{exact_memory_text(lean.cost.peak)}; the budget is {exact_memory_text(budget)}. "
                "Raise the budget, or make the arguments smaller; of a train step plan the loss, "
                "with reserve=opt_state.",
                lean.cost.peak,
                self._plan(lean, forms, budget),
            )
        found = min([each for each in near if each in fitting] or fitting, key=_seconds)
        if near and not _is_faster(_seconds(found), _seconds(self.baseline)):
            found = self.baseline
        return self._plan(found, forms, budget)

    def _regions(self, narrow: int) -> list[RegionInside]:
        if narrow not in self.regions:
            program = self.traced.program
            self.regions[narrow] = regions_within(
                program, narrow, split=self.split, devices=self.parts, ends=(), perturbed=()
            )
        return self.regions[narrow]

    def _in_chunks(self, regions: Sequence[RegionInside], most_bytes: int) -> _Form:
        return self._form(self._chunks_of(regions, most_bytes))

    def _chunks_of(self, regions: Sequence[RegionInside], most_bytes: int) -> tuple[Chunks, ...]:
        most_in_turn = compiler_on(self.platform).most_in_turn
        return tuple(filter(None, (each.chunks(most_bytes, most_in_turn) for each in regions)))

    @functools.cached_property
    def _sizes(self) -> list[int]:
        """Bytes of a chunk that are tried, the same for every budget, the largest first."""
        sizes = [max(self.baseline.cost.temporaries // 2, SETTINGS.least_chunk)]
        while sizes[-1] > SETTINGS.least_chunk:
            sizes.append(max(sizes[-1] // SETTINGS.smaller_chunks, SETTINGS.least_chunk))
        return sizes

    def _of_size(self, size: int) -> _Form:
        """The function with regions around values wider than a chunk, in chunks of this size."""
        return self._in_chunks(self._regions(size), size)

    def _within(self, budget: int) -> list[_Form]:
        """The largest of the sizes of chunks that fits, those before it, and its neighbours.

        Where none fits they are all of them: no budget is refused that the least of another fits.
        """
        whole = self.baseline.cost
        available = budget - whole.peak + whole.temporaries
        found = []
        for size in self._sizes:
            if 2 * size <= available:
                found.append(self._of_size(size))
                if found[-1].cost.peak <= budget:
                    found += self._fewer_chunks(self._regions(size), budget, size)
                    return found + self._smaller_chunks(size, min(found, key=_seconds))
        return [self._of_size(size) for size in self._sizes]

    def _smaller_chunks(self, fits: int, fastest: _Form) -> list[_Form]:
        """Smaller chunks than some that fit, as long as they are faster: they may fit a cache."""
        found = [fastest]
        for size in self._sizes[self._sizes.index(fits) + 1 :]:
            found.append(self._of_size(size))
            if _seconds(found[-1]) >= _seconds(found[-2]):
                break
        return found

    def _faster(self) -> list[_Form]:
        """The largest chunks that are predicted nearly the fastest, and faster than the whole.

        On a CPU a chunk may fit a cache, and takes less memory that is new in each run. The
        largest, as short slices may be 12 times as slow as the whole, which is not known.
        """
        if self.device is None:
            return []
        temporaries = self.baseline.cost.temporaries
        whole = self._predicted((), temporaries)
        predicted = {}
        for size in self._sizes:
            if regions := self._regions(size):
                chunks = self._chunks_of(regions, size)
                predicted[size] = self._predicted(chunks, min(2 * size, temporaries))
        most = SETTINGS.nearly_fastest * min(predicted.values(), default=0.0)
        near = [n for n, time in predicted.items() if time <= most and _is_faster(time, whole)]
        return [self._of_size(size) for size in near[: SETTINGS.compiled_in_chunks]]

    def _predicted(self, chunks: tuple[Chunks, ...], temporaries: int) -> float:
        """Picoseconds of the function in chunks, with so many bytes of temporaries."""
        assert self.device is not None
        unit = TimeUnit(self.device.rates, compiler_on(self.platform))
        jaxpr = self._traced(chunks).program.jaxpr
        return unit.total(jaxpr) / self.parts + unit.of_memory(temporaries)

    def _fewer_chunks(self, regions: Sequence[RegionInside], budget: int, fits: int) -> list[_Form]:
        """Regions in fewer and larger chunks than some that fit, up to those that just fit.

        What XLA needs for a chunk is not predicted, and is often less than what is read of it.
        """
        found = []
        too_large = max(each.region.bytes // each.devices for each in regions)
        for _ in range(SETTINGS.larger_chunks):
            middle = math.isqrt(fits * too_large)
            found.append(self._in_chunks(regions, middle))
            if found[-1].cost.peak <= budget:
                fits = middle
            else:
                too_large = middle
        return found

    def _form(self, chunks: tuple[Chunks, ...]) -> _Form:
        if chunks not in self.forms:
            self.forms[chunks] = self._compiled(chunks)
        return self.forms[chunks]

    def _function(self, chunks: tuple[Chunks, ...]) -> Callable[..., Any]:
        if not chunks:
            return self.fn
        return chunked_function(self.fn, chunks, True, self.signature)

    def _traced(self, chunks: tuple[Chunks, ...]) -> TracedForPlan:
        if chunks not in self.traces:
            fn = self._function(chunks)
            self.traces[chunks] = traced_for_plan(fn, self.args, {}, respect_checkpoints=True)
        return self.traces[chunks]

    def _compiled(self, chunks: tuple[Chunks, ...]) -> _Form:
        fn, traced = self._function(chunks), self._traced(chunks)

        def run(*arrays: Any) -> list[Any]:
            return split(fn(*self.skeleton.fill(arrays)))[0]

        run.__name__ = name_of(self.fn)
        with warnings.catch_warnings():
            # That no result takes the place of a donated array is no news to the function's user.
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            lowered = jax.jit(run, donate_argnums=self.donated).lower(*self.arrays)
        return _Form(
            chunks,
            signature_of(traced, respect_checkpoints=True),
            compiled_cost(lowered, self.platform, self.own, device=self.device),
            flops(traced.program.jaxpr),
        )

    def _plan(self, form: _Form, forms: list[_Form], budget: int) -> Plan:
        forms = list({id(each): each for each in forms}.values())
        return Plan(
            budget=budget,
            predicted=self._estimate(form),
            verified=self._estimate(form),
            unplanned_flops=self.baseline.flops,
            saved_bytes=0,
            compilations=len(forms),
            kept=(),
            candidates=tuple(self._candidate(each, each is form) for each in forms),
            decision=Baseline(),
            signature=form.signature,
            target=self.target.name if self.target else "",
            minimize="time" if self.device else "flops",
            chunks=form.chunks,
            whole=self.signature if form.chunks else None,
        )

    def _candidate(self, form: _Form, is_chosen: bool) -> PlanCandidate:
        cost = self._estimate(form)
        return PlanCandidate(
            predicted=cost,
            verified=cost,
            saved_bytes=0,
            change=chunks_text(form.chunks) if form.chunks else BASELINE,
            is_chosen=is_chosen,
        )

    def _estimate(self, form: _Form) -> Estimate:
        ratio = form.flops / self.baseline.flops if self.baseline.flops else 1.0
        time = form.cost.time
        seconds, source = (time.value, time.source) if time else (None, "")
        return Estimate(form.cost.peak, form.flops, ratio, form.cost.host, seconds, source)


def _donated(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[int, ...]:
    """Which of the arrays in its arguments a function donates, as `jax.jit` returns it."""
    trace, lower = (getattr(fn, name, None) for name in ("trace", "lower"))
    if not (callable(trace) and callable(lower)):
        return ()
    leaves, infos = jax.tree.leaves(args), jax.tree.leaves(getattr(trace(*args), "args_info", ()))
    if len(infos) != len(leaves):  # a static argument has none
        return ()
    of_arrays = [info for info, leaf in zip(infos, leaves, strict=True) if is_traced(leaf)]
    return tuple(k for k, info in enumerate(of_arrays) if info.donated)


def _seconds(form: _Form) -> float:
    return form.cost.time.value if form.cost.time else form.flops


def _is_faster(seconds: float, whole: float) -> bool:
    return seconds < (1 - SETTINGS.chunks_worth) * whole
