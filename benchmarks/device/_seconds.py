"""Seconds of gradients of several plans, as jrc states them and as measured, in turns."""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax

import jrc
from benchmarks._private import in_turns, memory_of, plan_for_each, program_figures
from benchmarks.device._programs import make
from benchmarks.device._rows import Row, serve, text_of
from tests.zoo.program import Program, gradient

BASELINE, FASTEST = "baseline", "plan, measured, 0.5"
BUDGETS, TOY_BUDGETS = (0.75, 0.5, 0.25, 0.0), (0.5,)
MEASURED = 0.5
ROUNDS, TOY_ROUNDS = 10, 2


def plan_name(budget: float) -> str:
    """Return the name of the plan of the least seconds within a budget."""
    return f"plan, {budget}"


def measure(name: str, toy: bool) -> Iterator[Row]:
    """Yield the baseline and plans of a program: peak, seconds stated and measured."""
    program = make(name, toy)
    plans, failed = planned(program, TOY_BUDGETS if toy else BUDGETS)
    losses: dict[str, Callable[..., Any]] = {BASELINE: program.loss}
    losses |= {name: plan.apply(program.loss) for name, plan in plans.items()}
    found, calls = {}, {}
    for each, loss in losses.items():
        run, arrays = gradient(program, loss)
        compiled = jax.jit(run).lower(*arrays).compile()
        found[each] = {"peak": memory_of(compiled).peak} | program_figures(compiled)
        calls[each] = lambda compiled=compiled, arrays=arrays: compiled(*arrays)
    for each, seconds in in_turns(calls, TOY_ROUNDS if toy else ROUNDS).items():
        found[each]["seconds"] = statistics.median(seconds)
    yield {"programs": found, "failed": failed}


def planned(
    program: Program, budgets: tuple[float, ...]
) -> tuple[dict[str, jrc.Plan], dict[str, str]]:
    """Return different plans by name, of the least seconds stated and measured; and what failed."""
    options = {"argnums": program.argnums, "has_aux": program.has_aux}
    plans: dict[str, jrc.Plan] = {}
    failed: dict[str, str] = {}
    for budget, plan in zip(
        budgets, plan_for_each(program.loss, *program.args, budgets=budgets, **options), strict=True
    ):
        if isinstance(plan, jrc.BudgetError):
            failed[plan_name(budget)] = text_of(plan)
        # The plan that is compared with the measured one stays in any case.
        elif budget == MEASURED or not any(is_same(plan, other) for other in plans.values()):
            plans[plan_name(budget)] = plan
    try:
        plans[FASTEST] = jrc.plan(
            program.loss, *program.args, budget=MEASURED, measure=True, **options
        )
    except Exception as error:  # noqa: BLE001
        failed[FASTEST] = text_of(error)
    return plans, failed


def is_same(plan: jrc.Plan, other: jrc.Plan) -> bool:
    """Return whether two plans decide the same."""
    return (plan.decision, plan.chunks) == (other.decision, other.chunks)


if __name__ == "__main__":
    serve(measure)
