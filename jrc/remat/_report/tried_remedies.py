"""What makes a peak smaller, compiled: plans of three sizes, and donated arguments."""

import contextlib
import dataclasses
import logging
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jrc._targets import Target
from jrc._tree import is_traced
from jrc.remat._compiled.hlo import parse_hlo
from jrc.remat._gradient.compiled_memory import compiled_with_memory, device_of
from jrc.remat._planner.budget import BudgetError
from jrc.remat._planner.make_plan import plan_for_each
from jrc.remat._planner.plan.plan import Plan
from jrc.remat._report.lowered_function import lowered_with_donation
from jrc.remat._report.remedies import LEAST_SAVING
from jrc.remat._report.remedy import Remedy, donation_text
from jrc.remat._report.report_data import ReportData
from jrc.remat._time.seconds import seconds_on

_logger = logging.getLogger("jrc")

# What is left of the temporaries in the budget of each plan.
_SHARES_OF_TEMPORARIES = (1 / 2, 1 / 4, 1 / 10)
_MIB = 2**20
_IN_MIB = 100 * _MIB
_MOST_LETTERS = 300


def with_tried_plans[R: ReportData](
    report: R,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    argnums: int | Sequence[int] | None,
    has_aux: bool,
    there: Target | None,
) -> R:
    """Return the report with the plans that programs were compiled for, the fastest first.

    Args:
        report: The report of the function without them, which may have a tried donation.
        fn: The function.
        args: Its arguments.
        argnums: As for `jrc.explain`.
        has_aux: Likewise.
        there: What programs are compiled for.
    """
    found = list(report.tried)
    options: dict[str, Any] = {"argnums": argnums, "has_aux": has_aux, "target": there}
    # What a plan leaves out are temporaries.
    if report.memory.temporaries > LEAST_SAVING * report.memory.peak:
        with _may_fail("plans"):
            found += _planned(report, fn, args, options)
    order = lambda each: (each.seconds_ratio or math.inf, -each.bytes)  # noqa: E731
    return dataclasses.replace(report, tried=tuple(sorted(found, key=order)))


def tried_donation(
    report: ReportData,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    lowered: jax.stages.Lowered,
    compiled: Any,
    device: Any,
) -> tuple[Remedy, ...]:
    """Return the donation of arguments as a remedy, compiled; nothing where that fails.

    Args:
        report: The report of the function as it is.
        fn: The function.
        args: Its arguments, shapes where it is compiled for a target.
        lowered: The function lowered.
        compiled: The same compiled; `None` where the compiler refuses it.
        device: The device with its rates, if they are known.
    """
    argnums, before = report.donatable_argnums, report.memory.peak
    with _may_fail("donated arguments"):
        lean = lowered_with_donation(fn, args, argnums, lowered, compiled)
        platform = device_of(leaf for leaf in jax.tree.leaves(args) if is_traced(leaf)).platform
        memory, program = compiled_with_memory(lean, platform)
        if program is None:
            return ()
        module = parse_hlo(program.as_text())
        time = seconds_on(module, device, memory.temporaries) if device else None
        seconds = time.value if time else None
        ratio = seconds / report.time.value if seconds and report.time else None
        size = max(before - memory.peak, 0)
        return (Remedy(donation_text(argnums), "donate", before, size, seconds, ratio, True),)
    return ()


@contextlib.contextmanager
def _may_fail(what: str) -> Iterator[None]:
    """Log what a trial raises: the report is finished without it."""
    try:
        yield
    except Exception as error:  # the user's function may raise anything
        text = textwrap.shorten(f"{type(error).__name__}: {error}", _MOST_LETTERS)
        _logger.warning("jrc.explain: %s could not be tried: %s", what, text)


def _planned(
    report: ReportData, fn: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> list[Remedy]:
    """Compile plans; those that help little are among them, and say that plans were tried."""
    memory = report.memory
    own = memory.peak - memory.temporaries
    sizes = [own + math.ceil(memory.temporaries * share) for share in _SHARES_OF_TEMPORARIES]
    budgets = list(map(_rounded, sizes))
    found: dict[int, Remedy] = {}
    answers = plan_for_each(fn, *args, budgets=budgets, **options)
    for budget, answer in zip(budgets, answers, strict=True):
        plan: Plan | None = answer.plan if isinstance(answer, BudgetError) else answer
        cost = plan.verified if plan else None
        if plan is None or cost is None:
            continue
        # A plan of a function as it is changes nothing but by chunks.
        is_other = bool(plan.chunks) or options["argnums"] is not None
        size = max(memory.peak - cost.peak_bytes, 0) if is_other else 0
        if plan is not answer and size > LEAST_SAVING * memory.peak:
            continue  # it helps, but not with this budget
        chunks = ", in chunks" if plan.chunks else ""
        text = f"jrc.plan(fn, *args, budget={_budget_text(budget)}{_options_text(**options)})"
        ratio = cost.seconds / report.time.value if cost.seconds and report.time else None
        new = Remedy(f"{text}{chunks}", "plan", memory.peak, size, cost.seconds, ratio, True)
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


def _rounded(size: int) -> int:
    """Whole MiB, where that changes a budget little."""
    return math.ceil(size / _MIB) * _MIB if size >= _IN_MIB else size


def _budget_text(size: int) -> str:
    return f"'{_rounded(size) // _MIB}MiB'" if size >= _IN_MIB else str(size)
