"""The plan of a function that is run and not differentiated: what of it runs in chunks."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jrc._errors import name_of, named_like
from jrc._jaxpr import flops, nbytes
from jrc._progress import shown_meanwhile
from jrc._targets import (
    Target,
    abstract_on,
    checked_target,
    target_device_context,
)
from jrc._text import exact_memory_text
from jrc._tree import aval_of, is_traced, split
from jrc.remat._chunks.chunks import Chunks
from jrc.remat._chunks.regions_within import chunks_within
from jrc.remat._gradient.arguments import refuse_tracers
from jrc.remat._gradient.compiled_memory import bytes_on_device, device_of
from jrc.remat._planner.budget import (
    Budget,
    BudgetError,
    Share,
    checked_budget,
    checked_reserve,
    less_reserve,
    memory_budget_of,
)
from jrc.remat._planner.costs.sharding import most_parts
from jrc.remat._planner.execute.chunked_function import chunked_function
from jrc.remat._planner.plan.decision import Baseline
from jrc.remat._planner.plan.plan import Plan
from jrc.remat._planner.plan.plan_candidates import Estimate, PlanCandidate
from jrc.remat._planner.plan.plan_of_process_0 import plan_of_process_0
from jrc.remat._planner.plan.saved_by_plan import BASELINE
from jrc.remat._planner.program.signature import Signature, signature_of
from jrc.remat._planner.program.trace import inlined_program, traced_for_plan
from jrc.remat._planner.search.compiled_cost import CompiledCost, compiled_cost
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._time.seconds import device_with_rates


def plans_as_it_is(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    budgets: Sequence[int | str | float | None],
    target: Target | str | None,
    asked: Mapping[str, bool],
    reserve: Any,
) -> list[Plan | BudgetError]:
    """Return the plans of a function that is not differentiated, or the error of a budget.

    Args:
        fn: The function.
        args: Its arguments.
        budgets: Each as for `plan`.
        target: As for `plan`.
        asked: Options of `plan` that it does not take, and whether they are asked for.
        reserve: As for `plan`.
    """
    for what in (each for each, is_asked in asked.items() if is_asked):
        raise ValueError(
            f"argnums=None must be used with a function that is planned as it is, got {what}, "
            "which is of gradients. Leave one of the two out."
        )
    if not callable(fn):
        raise TypeError(
            f"fn must be a function, got {type(fn).__name__}. Write jrc.plan(fn, *args)."
        )
    refuse_tracers(args)
    there = checked_target(target)
    # As arguments of `jax.jit`, and not as constants of the program.
    args = jax.tree.map(lambda x: aval_of(x) if isinstance(x, np.ndarray) else x, args)
    args = abstract_on(there, args) if there else args
    reserved = checked_reserve(reserve)
    limits = []
    for budget in budgets:
        if budget is None:
            arrays = jax.tree.leaves(args)
            budget = there.budget if there else memory_budget_of(device_of(arrays))
        limits.append(less_reserve(checked_budget(budget), reserved))
    made = functools.cache(lambda: _FunctionAsItIs(fn, args, there))
    found: list[Plan | BudgetError] = []
    with shown_meanwhile("jrc.plan: compiling"), target_device_context(there):
        for limit in limits:
            try:
                found.append(plan_of_process_0(lambda limit=limit: made().plan(limit)))
            except BudgetError as error:
                found.append(error.beside(reserved))
    return found


@dataclasses.dataclass(frozen=True)
class _Form:
    """One way to run the function, compiled."""

    chunks: tuple[Chunks, ...]
    signature: Signature
    cost: CompiledCost
    flops: int


class _FunctionAsItIs:
    """A function, and the ways to run it: as it is, and with regions in chunks.

    Args:
        fn: The function.
        args: Its arguments.
        target: What programs are compiled for.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], target: Target | None):
        self.fn, self.args, self.target = fn, args, target
        self.traced = traced_for_plan(fn, args, {}, respect_checkpoints=True)
        self.digest = signature_of(self.traced, respect_checkpoints=True).digest
        self.arrays, self.skeleton = split(args)
        self.donated = _donated(fn, args)
        device = device_of(self.arrays)
        self.platform = target.platform if target else device.platform
        self.device = device_with_rates(target, device)
        self.own = sum(map(bytes_on_device, self.arrays))
        self.own += sum(nbytes(x.aval) for x in self.traced.program.jaxpr.outvars)
        self.forms: dict[tuple[Chunks, ...], _Form] = {}
        self.baseline = self._form(())

    def plan(self, budget: Budget) -> Plan:
        """Return the plan: the function as it is if that fits, else the fewest chunks that do.

        Raises:
            BudgetError: If nothing fits.
        """
        forms = [self.baseline]
        if isinstance(budget, Share):
            budget = int(budget.of_baseline * self.baseline.cost.peak)
        if isinstance(budget, float):
            forms += [self._in_chunks(forms[0].cost.peak, each) for each in SETTINGS.chunk_sizes]
            least = min(each.cost.peak for each in forms)
            budget = int(least + budget * (forms[0].cost.peak - least))
        for share in SETTINGS.chunk_sizes:
            if any(each.cost.peak <= budget for each in forms):
                break
            forms.append(self._in_chunks(budget, share))
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
        return self._plan(min(fitting, key=_seconds), forms, budget)

    def _in_chunks(self, budget: int, share: float) -> _Form:
        most_bytes = max(int(share * (budget - self.own)), SETTINGS.least_chunk)
        if most_parts(self.arrays, self.traced.program) > 1:
            return self.baseline  # slices would be cut across devices
        chunks = chunks_within(self.traced.program, most_bytes, most_bytes, inlined_program)
        return self._form(tuple(chunks)) if chunks else self.baseline

    def _form(self, chunks: tuple[Chunks, ...]) -> _Form:
        if chunks not in self.forms:
            self.forms[chunks] = self._compiled(chunks)
        return self.forms[chunks]

    def _compiled(self, chunks: tuple[Chunks, ...]) -> _Form:
        fn = self.fn
        if chunks:
            fn = chunked_function(fn, chunks, respect_checkpoints=True, digest=self.digest)
        traced = traced_for_plan(fn, self.args, {}, respect_checkpoints=True)

        @named_like(self.fn)
        def run(*arrays: Any) -> list[Any]:
            return split(fn(*self.skeleton.fill(arrays)))[0]

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
            digest=self.digest if form.chunks else "",
        )

    def _candidate(self, form: _Form, is_chosen: bool) -> PlanCandidate:
        cost = self._estimate(form)
        return PlanCandidate(
            predicted=cost,
            compiled_peak_bytes=cost.peak_bytes,
            saved_bytes=0,
            change=f"{len(form.chunks)} regions in chunks" if form.chunks else BASELINE,
            is_chosen=is_chosen,
            compiled_host_bytes=cost.host_bytes,
            compiled_seconds=cost.seconds,
            compiled_seconds_from=cost.seconds_from,
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
