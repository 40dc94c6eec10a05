"""The tables of `benchmarks.memory.zoo`."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks._lib.report import Report
from benchmarks._lib.table import Table, mib
from tests.zoo.catalogue import description

Figures = Mapping[str, Any]
LEANEST = "0.0"
# A millionth of the FLOPs is one or two sums of the smallest values.
SLACK = 1 + 1e-6
# A ten-thousandth of the bytes is how XLA aligns a few buffers.
ALIGNMENT = 1e-4


def tables(report: Report) -> list[Table]:
    """Return one table for each program, then the summary."""
    models = report["models"]
    return [*(_program(name, found) for name, found in models.items()), *summary(report)]


def summary(report: Report) -> list[Table]:
    """Return one table with a row for each program whose plain gradient was measured."""
    models = {
        name: found
        for name, found in report["models"].items()
        if "peak" in found["by_hand"].get("nothing", {})
    }
    budgets = list(dict.fromkeys(b for found in models.values() for b in found["plans"]))
    device = report.get("target") or report["device"]
    title = (
        f"`jrc.plan` on the programs of `tests/zoo` ({device}, jax {report['jax']}): "
        "compiled peak, MiB, and in brackets FLOPs over those of the program as it is written; "
        "under `jax.checkpoint` (or its package's own) around each block; plans at fractions of "
        "the range from the least peak to that of the baseline; which way by hand has "
        "fewer FLOPs within the budget of a plan, or a lower peak than the leanest plan"
    )
    heads = ("", "as written", "each block", *(f"plan at {b}" for b in budgets), "beaten by", "")
    rows = [tuple(_row(name, found, budgets)) for name, found in models.items()]
    return [Table(title, heads, rows, _note(list(models.values())))]


def beating(found: Figures) -> dict[str, list[str]]:
    """Return for each budget the ways by hand that beat its plan.

    Of every plan: fewer FLOPs within the budget that it was asked for, of which the plan may use
    less. Of the leanest: a lower peak too, by more than alignment.
    """
    rows = {name: row for name, row in found["by_hand"].items() if "peak" in row}
    beaten = {}
    for budget, plan in found["plans"].items():
        if "peak" in plan:
            beaten[budget] = [
                name
                for name, row in rows.items()
                if (row["peak"] <= plan["budget"] and row["flops"] * SLACK < plan["flops"])
                or (budget == LEANEST and row["peak"] < (1 - ALIGNMENT) * plan["peak"])
            ]
    return beaten


def _program(name: str, found: Figures) -> Table:
    base = found["by_hand"]["nothing"]
    rows = [_cells(way, row, base, "") for way, row in found["by_hand"].items()]
    beaten = beating(found)
    for budget, row in found["plans"].items():
        rows.append(_cells(f"plan, {budget}", row, base, ", ".join(beaten.get(budget, ()))))
    heads = ("", "predicted", "peak", "FLOPs", "seconds", "compiled", "gradients", "")
    return Table(f"{name}: MiB, FLOPs as a ratio; last the ways that beat it", heads, rows)


def _cells(name: str, row: Figures, base: Figures, beats: str) -> tuple[str, ...]:
    if "peak" not in row:
        return (name, *[""] * 6, row.get("error", "")[:60])
    flops = f"{row['flops'] / base['flops']:.3f}" if "flops" in base else ""
    return (
        name,
        mib(row["predicted_peak"], 2) if "predicted_peak" in row else "",
        mib(row["peak"], 2),
        flops,
        f"{row['seconds']:.1f}" if "seconds" in row else "",
        str(row.get("compilations", "")),
        f"{row['gradients_differ']:.0e}" if "gradients_differ" in row else "",
        beats,
    )


def _row(name: str, found: Figures, budgets: Sequence[str]) -> Iterator[str]:
    hand, plans = found["by_hand"], found["plans"]
    yield name
    yield mib(hand["nothing"]["peak"], 1)
    for row in (hand.get("each block"), *map(plans.get, budgets)):
        yield _peak_and_flops(row, hand["nothing"])
    ways = [f"{way} (at {b})" for b, names in beating(found).items() for way in names]
    yield ", ".join(ways) or "-"
    yield description(name)


def _peak_and_flops(row: Figures | None, base: Figures) -> str:
    if row is None:
        return "-"
    if "peak" not in row:
        return "failed"
    return f"{mib(row['peak'], 1)} ({row['flops'] / base['flops']:.3f})"


def _note(models: Sequence[Figures]) -> str:
    plans = [row for found in models for row in found["plans"].values() if "peak" in row]
    if not plans:
        return ""
    errors = [abs(row["predicted_peak"] / row["peak"] - 1) for row in plans]
    seconds = statistics.median(row["seconds"] for row in plans)
    compiled = statistics.median(row["compilations"] for row in plans)
    return (
        f"Predicted against compiled peak of these {len(plans)} plans: off by "
        f"{statistics.median(errors):.1%} (median), {max(errors):.1%} (worst); a plan takes "
        f"{seconds:.0f} s and {compiled:g} compilations (medians)."
    )
