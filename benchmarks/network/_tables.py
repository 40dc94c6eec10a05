"""The tables of `benchmarks.network.steps`."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks._lib.report import Report
from benchmarks._lib.table import Table, megabytes, milliseconds

TITLES = {"dense": "dense", "dgc": "DGC", "ddp": "DDP", "powersgd": "PowerSGD"}
Figures = Mapping[str, Any]


def tables(report: Report) -> list[Table]:
    """Return times and bytes of all rows, then ratios with their range."""
    return [steps_table(report), ratios_table(report)]


def steps_table(report: Report) -> Table:
    """Return seconds, ratios to DGC and bytes of each row."""
    methods = methods_of(report)
    titles = [TITLES[method] for method in methods]
    others = [f"{TITLES[method]} / DGC" for method in methods if method != "dgc"]
    title = (
        f"Whole optimizer steps of {report['parameters'] / 1e6:.1f} M parameters in "
        f"{report['leaves']} leaves, one process in each network namespace of a machine with "
        f"{report['cores']} cores ({report['device']}, jax {report['jax']}{_load(report)}): rate "
        "that plain TCP reaches, Mbit/s; dense momentum SGD and DGC at 99.9 %"
        f"{_of_pytorch(report)}, milliseconds (quartiles); how many times as long as DGC's; MB "
        f"that a process sends in a step, {' / '.join(titles)}, at its interface and as predicted"
    )
    heads = ("", "TCP", *titles, *others, "MB sent", "predicted")
    rows = [_steps_row(name, row, methods) for name, row in report["runs"].items()]
    return Table(title, heads, rows)


def _steps_row(name: str, row: Figures, methods: Sequence[str]) -> tuple[str, ...]:
    ratios = (ratio_of(row, method) for method in methods if method != "dgc")
    return (
        name,
        f"{min(row['measured_mbit']):,.0f}",
        *(_seconds(row.get(method)) for method in methods),
        *("-" if at is None else f"{at['ratio']:.1f}" for at in ratios),
        *(
            " / ".join(_bytes(row.get(method), key) for method in methods)
            for key in ("bytes_sent", "bytes_predicted")
        ),
    )


def ratios_table(report: Report) -> Table:
    """Return how many times DGC's seconds a step takes, with the range over pairs of blocks."""
    others = [method for method in methods_of(report) if method != "dgc"]
    rows = [
        (name, *(_range_of(ratio_of(row, method)) for method in others))
        for name, row in report["runs"].items()
    ]
    title = "How many times DGC's seconds: medians, and the range over pairs of blocks"
    return Table(title, ("", *(TITLES[method] for method in others)), rows)


def methods_of(report: Report) -> list[str]:
    """Return the methods that any row has, in the order of the tables."""
    return [name for name in TITLES if any(name in row for row in report["runs"].values())]


def ratio_of(row: Figures, method: str) -> Figures | None:
    """Return where a row has a method's ratio to DGC; dense's stands in the row itself."""
    at = row if method == "dense" else row.get(method, {})
    return at if "ratio" in at else None


def _range_of(at: Figures | None) -> str:
    if at is None:
        return "-"
    return f"{at['ratio']:.1f} ({at['ratios'][0]:.1f}-{at['ratios'][-1]:.1f})"


def _seconds(at: Figures | None) -> str:
    if at is None:
        return "-"
    return f"{milliseconds(at['seconds'], 0)} ({_span(at['quartiles'])})"


def _bytes(at: Figures | None, key: str) -> str:
    return "-" if at is None or at[key] is None else megabytes(at[key], 2)


def _span(seconds: Sequence[float]) -> str:
    return "–".join(milliseconds(each, 0) for each in seconds)


def _load(report: Report) -> str:
    """Return the load as the run began, where the report has it."""
    return f", load {report['load']:g} as it began" if report.get("load") else ""


def _of_pytorch(report: Report) -> str:
    """Return what PyTorch's methods are, where they were measured."""
    copies = [row["handing_over"] for row in report["runs"].values() if "handing_over" in row]
    if not copies:
        return ""
    took = _span(sorted({min(copies), max(copies)}))
    return (
        f"; PyTorch {report['torch']}'s DistributedDataParallel over gloo with momentum SGD, one "
        "thread a process, as it comes and with its PowerSGD (rank 1, error feedback, warm start; "
        f"two thin factors for each matrix, vectors dense), {took} ms of each in handing prepared "
        "gradients over"
    )
