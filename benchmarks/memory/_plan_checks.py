"""What `jrc.plan` promises, checked on the figures of a model."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks._models.planner import COMPILATIONS

# How far FLOPs may exceed the plan's, for what transposition adds.
SLACK = 1.001
# Beside those of the row: ways by hand that would cost less.
BY_HAND = 2
Figures = Mapping[str, Any]


def broken(name: str, found: Figures) -> Iterator[str]:
    """Yield every promise that the plans of a model break."""
    rows = [*found["budgets"], *(row for row in found["beside"].values() if "peak" in row)]
    for row in rows:
        yield from (f"{name}: budget {row['budget']:,}{what}" for what in _of_plan(row))
    planned = sorted((row for row in rows if "peak" in row), key=lambda row: row["budget"])
    for small, large in zip(planned, planned[1:], strict=False):
        if large["flops"] > small["flops"]:
            yield f"{name}: {large['budget']:,} costs more than {small['budget']:,}"
    for way in cheaper_by_hand(found):
        yield f"{name}: `{way}` costs less than the plan within its peak"
    refused = found["refused"]
    if "peak" in refused or refused["least"] <= refused["budget"]:
        yield f"{name}: {refused['budget']:,} is not refused, or not with the least bytes"


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

    A millionth is allowed, which is one or two sums of the smallest values.
    """
    return [
        name
        for name, row in found["references"].items()
        if not found["beside"][name].get("flops", float("inf")) <= row["flops"] * (1 + 1e-6)
    ]
