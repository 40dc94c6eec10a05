"""Seconds of gradients of several plans, as jrc states them and as measured, in turns."""

import functools
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from benchmarks._private import in_turns, memory_of, plan_for_each, program_figures
from benchmarks.device._kernels import write_kernels
from benchmarks.device._plans import Plans, plans_of
from benchmarks.device._programs import make
from benchmarks.device._rows import Row, Settings, serve
from tests.zoo.program import Program, gradient

PART = "seconds"
BASELINE, BY_HAND = "baseline", "every block recomputed"
BUDGETS, TOY_BUDGETS = (0.75, 0.5, 0.25, 0.0), (0.5,)
ROUNDS, TOY_ROUNDS = 10, 2
_AT_ONCE = 6


def plan_name(budget: float) -> str:
    """Return the name of the plan of the least seconds within a budget."""
    return f"plan, {budget}"


def measure(name: str, settings: Settings) -> Iterator[Row]:
    """Yield the baseline and plans of a program: peak, seconds stated and measured."""
    program, toy = make(name, settings.toy), settings.toy
    plans, failed = plans_of(settings, PART, name, lambda: planned(program, toy))
    losses = {BASELINE: program.loss} | ({BY_HAND: program.build({})} if program.by_hand else {})
    # Equal plans are measured once.
    different = {plan.to_json(): name for name, plan in reversed(plans.items())}
    losses |= {name: plans[name].apply(program.loss) for name in reversed(different.values())}
    same = {name: different[plan.to_json()] for name, plan in plans.items()}
    programs = compiled(program, losses)
    found = timed(programs, toy)
    for each, plan in plans.items():
        if each in found and plan.target and plan.verified:
            found[each]["target_peak"] = plan.verified.peak_bytes
    yield {"programs": found, "same": same, "failed": failed}
    if settings.kernels:
        write_kernels(settings.kernels, name, programs)


def compiled(
    program: Program, losses: dict[str, Callable[..., Any]]
) -> dict[str, tuple[Any, Callable[[], Any]]]:
    """Return the compiled gradient of each loss, and what runs it."""

    lowered = {}
    for name, loss in losses.items():
        run, arrays = gradient(program, loss)
        lowered[name] = jax.jit(run).lower(*arrays), arrays
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        done = list(pool.map(lambda each: each[0].compile(), lowered.values()))
    return {
        name: (each, functools.partial(each, *lowered[name][1]))
        for name, each in zip(losses, done, strict=True)
    }


def timed(programs: dict[str, tuple[Any, Callable[[], Any]]], toy: bool) -> dict[str, Row]:
    """Return peak, stated and median of measured seconds of compiled programs."""
    found = {
        name: {"peak": memory_of(each).peak} | program_figures(each)
        for name, (each, _) in programs.items()
    }
    calls = {name: run for name, (_, run) in programs.items()}
    for name, seconds in in_turns(calls, TOY_ROUNDS if toy else ROUNDS).items():
        found[name]["seconds"] = statistics.median(seconds)
    return found


def planned(program: Program, toy: bool, target: str | None = None) -> Plans:
    """Return the plan of the least stated seconds within each budget, or its error."""
    budgets = TOY_BUDGETS if toy else BUDGETS
    found = plan_for_each(
        program.loss, *program.args, budgets=budgets, argnums=program.argnums,
        has_aux=program.has_aux, target=target,
    )  # fmt: skip
    return dict(zip(map(plan_name, budgets), found, strict=True))


if __name__ == "__main__":
    serve(measure)
