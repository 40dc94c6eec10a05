"""The tables of `benchmarks.memory.zoo`."""

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks._lib.report import Report
from benchmarks._lib.table import Table, mib

Figures = Mapping[str, Any]
LEANEST = "0.0"
# A millionth of the FLOPs is one or two sums of the smallest values.
SLACK = 1 + 1e-6


def tables(report: Report) -> list[Table]:
    """Return one table for each program, then one row for each."""
    models = report["models"]
    return [*(_programs(name, found) for name, found in models.items()), _summary(report)]


def beating(found: Figures) -> dict[str, list[str]]:
    """Return for each budget the ways by hand that beat its plan.

    Of every plan: fewer FLOPs within its peak. Of the leanest: a lower peak too.
    """
    rows = {name: row for name, row in found["by_hand"].items() if "peak" in row}
    beaten = {}
    for budget, plan in found["plans"].items():
        if "peak" in plan:
            beaten[budget] = [
                name
                for name, row in rows.items()
                if (row["peak"] <= plan["peak"] and row["flops"] * SLACK < plan["flops"])
                or (budget == LEANEST and row["peak"] < plan["peak"])
            ]
    return beaten


def _programs(name: str, found: Figures) -> Table:
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


def _summary(report: Report) -> Table:
    models = report["models"]
    errors = [each for found in models.values() for each in _errors(found)]
    title = (
        f"`jrc.plan` on programs from packages ({report['device']}, jax {report['jax']}): peak "
        "with nothing recomputed, under a checkpoint around each block, and of the plans, MiB; "
        "FLOPs of the plans, as a ratio; how often a way by hand beats a plan"
    )
    if errors:
        title += (
            f". Predicted against compiled peak: off by {statistics.median(errors):.1%} (median), "
            f"{max(errors):.1%} (worst)"
        )
    budgets = list(next(iter(models.values()))["plans"]) if models else []
    heads = ("", "nothing", "each block", *(f"at {b}" for b in budgets),
             *(f"FLOPs at {b}" for b in budgets), "beaten")  # fmt: skip
    return Table(title, heads, [tuple(_row(name, found)) for name, found in models.items()])


def _row(name: str, found: Figures) -> Iterator[str]:
    hand, plans = found["by_hand"], found["plans"].values()
    yield name
    for way in ("nothing", "each block"):
        yield mib(hand[way]["peak"], 2) if "peak" in hand.get(way, {}) else "-"
    for row in plans:
        yield mib(row["peak"], 2) if "peak" in row else "failed"
    for row in plans:
        yield f"{row['flops'] / hand['nothing']['flops']:.3f}" if "peak" in row else "-"
    yield str(sum(map(len, beating(found).values())))


def _errors(found: Figures) -> Iterator[float]:
    for row in found["plans"].values():
        if "peak" in row:
            yield abs(row["predicted_peak"] / row["peak"] - 1)
