"""The tables of `network.py` in a terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table

TITLES = {"dense": "dense", "dgc": "DGC", "ddp": "DDP", "powersgd": "PowerSGD"}
MB = 10**6


def show(console: Console, report: dict[str, Any]) -> None:
    size = f"{report['parameters']:,} parameters in {report['leaves']} leaves"
    methods = methods_of(report)
    others = [method for method in methods if method != "dgc"]
    times = _table(f"{size}: seconds, medians ± half of what lies between the quartiles")
    over = _table("Mbit/s of plain TCP; how many times DGC's seconds: medians, and pairs of blocks")
    sent = _table("MB that a process sends in a step: counted at its interface, and (predicted)")
    for table, heads in ((times, methods), (over, ["Mbit/s", *others]), (sent, methods)):
        for head in heads:
            table.add_column(TITLES.get(head, head), justify="right", no_wrap=True)
    for name, row in report["runs"].items():
        rate = f"{min(row['measured_mbit']):,.0f}"
        times.add_row(name, *(_seconds_cell(row.get(method)) for method in methods))
        over.add_row(name, rate, *(_ratio_cell(row, method) for method in others))
        sent.add_row(name, *(_bytes_cell(row.get(method)) for method in methods))
    for table in (times, over, sent):
        console.print(table)


def methods_of(report: dict[str, Any]) -> list[str]:
    """Those that any row has, in the order of the tables."""
    return [name for name in TITLES if any(name in row for row in report["runs"].values())]


def ratio_of(row: dict[str, Any], method: str) -> dict[str, Any] | None:
    """How long a method's step takes beside DGC's; that of dense stands in the row itself."""
    at = row if method == "dense" else row.get(method, {})
    return at if "ratio" in at else None


def _table(title: str) -> Table:
    table = Table(title=title)
    table.add_column("")
    return table


def _seconds_cell(at: dict[str, Any] | None) -> str:
    if at is None:
        return "-"
    low, high = at["quartiles"]
    return f"{at['seconds']:.3f} ±{(high - low) / 2:.3f}"


def _ratio_cell(row: dict[str, Any], method: str) -> str:
    at = ratio_of(row, method)
    return (
        "-" if at is None else f"{at['ratio']:.1f} ({at['ratios'][0]:.1f}-{at['ratios'][-1]:.1f})"
    )


def _bytes_cell(at: dict[str, Any] | None) -> str:
    if at is None:
        return "-"
    sent = at["bytes_sent"]
    return f"{'-' if sent is None else _megabytes(sent)} ({_megabytes(at['bytes_predicted'])})"


def _megabytes(count: float) -> str:
    return f"{count / MB:,.{1 if count >= 10 * MB else 3}f}"
