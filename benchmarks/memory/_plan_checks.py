"""What `jrc.plan` promises, checked on the figures of a model."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks._models.planner import COMPILATIONS

# How far FLOPs may exceed the plan's, for what transposition adds.
SLACK = 1.001
# Beside those of the row: ways by hand that would cost less.
BY_HAND = 2
# How far FLOPs may rise with the budget: few programs are compiled for each, and others for the
# next one (docs/limits.md).
RISE = 1.01
# How far a way by hand may be below the plan: a search ends where it expects to save less than
# such a share (`least_gain` of the planner's settings).
NEARLY_EQUAL = 1.0005
Figures = Mapping[str, Any]


def broken(name: str, found: Figures) -> Iterator[str]:
    """Yield every promise that the plans of a model break."""
    rows = [*found["budgets"], *(row for row in found["beside"].values() if "peak" in row)]
    for row in rows:
        yield from (f"{name}: budget {row['budget']:,}{what}" for what in _of_plan(row))
    for budget, rise in rises(found):
        if rise > RISE:
            yield f"{name}: {budget:,} costs {rise:.4f} times what a smaller budget costs"
    for way in cheaper_by_hand(found):
        yield f"{name}: `{way}` costs less than the plan within its peak"
    tight = found["refused"]
    if tight.get("peak", 0) > tight["budget"]:
        yield f"{name}: budget {tight['budget']:,} exceeded: {tight['peak']:,}"
    if "peak" not in tight and tight["least"] <= tight["budget"]:
        yield f"{name}: {tight['budget']:,} is refused, and the least is {tight['least']:,}"


def rises(found: Figures) -> list[tuple[int, float]]:
    """Return the budgets whose plan costs more than that of a smaller one, and how much more."""
    rows = [*found["budgets"], *found["beside"].values()]
    planned = sorted((row for row in rows if "peak" in row), key=lambda row: row["budget"])
    found_rises = []
    least = float("inf")
    for row in planned:
        if row["flops"] > least:
            found_rises.append((row["budget"], row["flops"] / least))
        least = min(least, row["flops"])
    return found_rises


def _of_plan(row: Figures) -> Iterator[str]:
    if "peak" not in row:
        yield f" refused; the least is {row['least']:,}"
        return
    if row["peak"] > row["budget"]:
        yield f" exceeded: {row['peak']:,}"
    if row["compilations"] > COMPILATIONS + BY_HAND:
        yield f": {row['compilations']} compilations"
    if row["flops"] > SLACK * row["predicted_flops"]:
        yield f": {row['flops']:,} FLOPs, planned {row['predicted_flops']:,}"
    if row["compiled_products"] > row["products"]:
        yield f": {row['compiled_products']} products for {row['products']}"


def cheaper_by_hand(found: Figures) -> list[str]:
    """Return the ways by hand that cost less than the plan within their peak, or that no plan fits.

    A share of 0.0005 is allowed: for less a search compiles nothing more.
    """
    return [
        name
        for name, row in found["references"].items()
        if not found["beside"][name].get("flops", float("inf")) <= row["flops"] * NEARLY_EQUAL
    ]
