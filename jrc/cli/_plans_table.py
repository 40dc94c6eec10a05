"""`jrc plan` with several budgets: one table, and a file for each plan."""

import pathlib
from collections.abc import Sequence

from jrc._text import memory_text, seconds_text, table_text
from jrc.remat import BudgetError, Plan, chunks_text


def plans_table(texts: Sequence[str], plans: Sequence[Plan | BudgetError]) -> str:
    """Return the table of what each budget costs.

    Args:
        texts: The budgets as they were written.
        plans: For each its plan, or the error of one that no plan fits.
    """
    heads = ("budget", "plan", "peak", "time", "FLOPs", "compilations")
    return table_text(heads, [_row(*pair) for pair in zip(texts, plans, strict=True)])


def path_for(path: str | None, text: str) -> str | None:
    """Return the file of one of several results, by the text that tells it from the others.

    >>> path_for("runs/plan.json", "2GiB")
    'runs/plan-2GiB.json'
    """
    if path is None:
        return None
    whole = pathlib.Path(path)
    return str(whole.with_name(f"{whole.stem}-{text}{whole.suffix}"))


def _row(text: str, plan: Plan | BudgetError) -> tuple[str, ...]:
    """Return the row of a budget: which candidate is its plan, and what that costs."""
    if isinstance(plan, BudgetError):
        return text, "none fits", f"at least {memory_text(plan.least_bytes)}", "", "", ""
    cost = plan.verified or plan.predicted
    about = "" if plan.verified else "~"  # predicted, as in the table of candidates
    return (
        f"{text} = {memory_text(plan.budget)}" if text[-1].isdigit() else text,
        _name(plan),
        f"{about}{memory_text(cost.peak_bytes)}",
        "" if cost.seconds is None else seconds_text(cost.seconds),
        f"{cost.flops_ratio:.3f} x",
        f"{plan.compilations}",
    )


def _name(plan: Plan) -> str:
    """Return which candidate a plan is: its name, or its place among those without one."""
    chosen = next((i for i, each in enumerate(plan.candidates) if each.is_chosen), None)
    if chosen is None:
        return ""
    found = plan.candidates[chosen]
    # What recomputes nothing is the last of the list, in front of the manual plans.
    count = next((i for i, each in enumerate(plan.candidates, 1) if each.name), None)
    if count is None:  # a function as it is: chunks or none
        return found.change
    name = found.name or f"{chosen + 1} of {count}, the leanest first"
    return f"{name}; {chunks_text(plan.chunks)}" if plan.chunks else name
