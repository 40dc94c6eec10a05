"""What makes a peak smaller, compiled: plans of three sizes, and donated arguments."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jrc._targets import Target, abstract_on, target_device_context
from jrc._tree import is_traced
from jrc.remat._compiled.hlo import parse_hlo
from jrc.remat._gradient.compiled_memory import compiled_with_memory, device_of
from jrc.remat._planner.budget import BudgetError
from jrc.remat._planner.make_plan import plan_for_each
from jrc.remat._planner.plan.plan import Plan
from jrc.remat._report.lowered_function import lowered_function
from jrc.remat._report.remedy import Remedy, donation_text
from jrc.remat._report.report_data import ReportData
from jrc.remat._time.seconds import device_with_rates, seconds_on

# What is left of the temporaries in the budget of each plan.
_SHARES_OF_TEMPORARIES = (1 / 2, 1 / 4, 1 / 10)
_MIB = 2**20
_IN_MIB = 100 * _MIB


def tried_remedies(
    report: ReportData,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    argnums: int | Sequence[int] | None,
    has_aux: bool,
    there: Target | None,
) -> tuple[Remedy, ...]:
    """Return the remedies that programs with them were compiled for, the fastest first.

    Args:
        report: The report of the function without them.
        fn: The function.
        args: Its arguments.
        argnums: As for `jrc.explain`.
        has_aux: Likewise.
        there: What programs are compiled for.
    """
    found = []
    if argnums is None and report.donatable:
        found += _donated(report, fn, args, there)
    options: dict[str, Any] = {"argnums": argnums, "has_aux": has_aux, "target": there}
    found += _planned(report, fn, args, options)
    order = lambda each: (each.seconds_ratio or math.inf, each.peak_bytes)  # noqa: E731
    return tuple(sorted(found, key=order))


def _planned(
    report: ReportData, fn: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> list[Remedy]:
    memory = report.memory
    own = memory.peak - memory.temporaries
    budgets = [_rounded(own + int(memory.temporaries * share)) for share in _SHARES_OF_TEMPORARIES]
    plans = plan_for_each(fn, *args, budgets=budgets, **options)
    found: dict[int, Remedy] = {}
    for budget, answer in zip(budgets, plans, strict=True):
        plan: Plan | None = answer.plan if isinstance(answer, BudgetError) else answer
        cost = plan.verified if plan else None
        if plan is None or cost is None or cost.peak_bytes >= memory.peak:
            continue
        fits = _budget_text(max(budget, cost.peak_bytes))
        chunks = ", in chunks" if plan.chunks else ""
        text = f"jrc.plan(fn, *args, budget={fits}{_options_text(**options)}){chunks}"
        size = memory.peak - cost.peak_bytes
        ratio = cost.seconds / report.time.value if cost.seconds and report.time else None
        new = Remedy(text, "plan", memory.peak, size, cost.seconds, ratio, True)
        found.setdefault(size, new)
    different = list(found.values())
    return [each for each in different if not any(_is_better(x, each) for x in different)]


def _options_text(argnums: int | Sequence[int] | None, has_aux: bool, target: Target | None) -> str:
    """The options of a call that are not the usual ones."""
    text = "" if argnums == 0 else f", argnums={argnums}"
    text += ", has_aux=True" if has_aux else ""
    return text + (f", target={target.name!r}" if target else "")


def _is_better(one: Remedy, other: Remedy) -> bool:
    """Whether one is both smaller and no slower than another."""
    faster = (one.seconds_ratio or 0.0) <= (other.seconds_ratio or 0.0)
    return one.bytes > other.bytes and faster


def _donated(
    report: ReportData, fn: Callable[..., Any], args: tuple[Any, ...], there: Target | None
) -> list[Remedy]:
    if not report.donatable_argnums:
        return []
    with target_device_context(there):
        args = abstract_on(there, args) if there else args
        lowered, _ = lowered_function(fn, args, report.donatable_argnums)
        device = device_of(leaf for leaf in jax.tree.leaves(args) if is_traced(leaf))
        memory, compiled = compiled_with_memory(lowered, device.platform)
    if compiled is None or memory.peak >= report.memory.peak:
        return []
    module = parse_hlo(compiled.as_text())
    known = device_with_rates(there, device)
    time = seconds_on(module, known, memory.temporaries) if known else None
    return [
        Remedy(
            donation_text(report.donatable_argnums),
            "donate",
            report.memory.peak,
            report.memory.peak - memory.peak,
            time.value if time else None,
            time.value / report.time.value if time and report.time else None,
            True,
        )
    ]


def _rounded(size: int) -> int:
    """Whole MiB, where that changes a budget little."""
    return math.ceil(size / _MIB) * _MIB if size >= _IN_MIB else size


def _budget_text(size: int) -> str:
    return f"'{_rounded(size) // _MIB}MiB'" if size >= _IN_MIB else str(size)
