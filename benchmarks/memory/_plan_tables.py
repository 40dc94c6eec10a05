"""The results of `benchmarks/plan.py` as tables in a terminal."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

MIB = 2**20


def mib(count: int) -> str:
    return f"{count / MIB:,.1f}"


def show(console: Console, report: Mapping[str, Any]) -> None:
    for found in report["models"].values():
        console.print(_ways(found))
    if any("budgets" in found for found in report["models"].values()):
        console.print(_summary(report["models"].values()))


def _ways(found: Mapping[str, Any]) -> Table:
    heads = ("", "peak", "temp.", "saved", "FLOPs", "dots", "compile")
    table = Table(title=f"{found['title']}: MiB, ratios, seconds")
    for head in heads:
        table.add_column(head, justify="right" if head else "left", no_wrap=True)
    base = found["baseline"]
    rows = {"nothing re-run": base, **found["references"]}
    for name, row in rows.items():
        table.add_row(*_cells(name, row, base))
        if "peak" in (plan := found.get("beside", {}).get(name, {})):
            table.add_row(*_cells("  a plan within this", plan, base), style="green")
    for name in ("half", "quarter"):
        if "peak" in (plan := found.get("beside", {}).get(name, {})):
            table.add_row(*_cells(f"a plan, {name} the temp.", plan, base), style="green")
    for row in _different(found.get("budgets", ())):
        table.add_row(*_cells(f"a plan within {mib(row['budget'])}", row, base))
    return table


def _different(rows: Any) -> Iterator[Mapping[str, Any]]:
    """Each plan once, at the smallest budget that it was made for."""
    last = None
    for row in rows:
        if "peak" in row and (now := (row["peak"], row["flops"])) != last:
            last = now
            yield row


def _cells(name: str, row: Mapping[str, Any], base: Mapping[str, Any]) -> Iterator[str]:
    yield name
    yield from (mib(row[key]) for key in ("peak", "temporaries", "saved"))
    yield from (f"{row[key] / base[key]:.3f}" for key in ("flops", "product_flops"))
    yield f"{row['compile_seconds']:.1f}"


def _summary(models: Any) -> Table:
    heads = ("", "peak", "least", "exceeded", "dearer", "compilations", "seconds")
    table = Table(*heads, title="All budgets of each model, MiB")
    for found in models:
        if "budgets" in found:
            table.add_row(found["title"], *summary(found))
    return table


def summary(found: Mapping[str, Any]) -> Iterator[str]:
    """Peak, least peak, budgets exceeded, ways by hand that cost less, most compilations, time."""
    rows = [row for row in found["budgets"] if "peak" in row]
    yield mib(found["baseline"]["peak"])
    yield mib(found["least"])
    yield str(sum(row["peak"] > row["budget"] for row in rows))
    yield str(len(dearer(found)))
    yield str(max(row["compilations"] for row in rows))
    yield f"{found['seconds']:.1f}"


def dearer(found: Mapping[str, Any]) -> list[str]:
    """The ways by hand that are cheaper than the plan within their peak, or that no plan fits.

    Cheaper by more than a millionth: so little are one or two sums of the smallest values.
    """
    return [
        name
        for name, row in found["references"].items()
        if not found["beside"][name].get("flops", float("inf")) <= row["flops"] * (1 + 1e-6)
    ]
