"""The table of `benchmarks.network.training`."""

from collections.abc import Mapping
from typing import Any

from benchmarks._lib.report import Report
from benchmarks._lib.table import Table, megabytes
from benchmarks.network._training_methods import METHODS, exchanges

Figures = Mapping[str, Any]


def tables(report: Report) -> list[Table]:
    """Return one table with a row for each method, and columns for each link."""
    runs = report["runs"]
    rows = [
        _row(name, runs) for name in METHODS if any(name in run["methods"] for run in runs.values())
    ]
    heads = ["", "steps"]
    for name in runs:
        heads += [f"{name}: s", "computing"]
    return [Table(_title(report), (*heads, "MB sent", "predicted"), rows)]


def _row(name: str, runs: Mapping[str, Figures]) -> tuple[str, ...]:
    found = [run["methods"].get(name) for run in runs.values()]
    cells = []
    for each in found:
        cells += ["-", "-"] if each is None else [_seconds(each), _share(name, each)]
    steps = sorted({each["steps"] * len(each["blocks"]) for each in found if each})
    counted = [each for each in found if each]
    sent = [each["bytes_sent"] for each in counted if each["bytes_sent"] is not None]
    return (
        METHODS[name].title,
        "–".join(str(count) for count in (steps[:1] + steps[1:][-1:])),
        *cells,
        megabytes(sent[-1], 3) if sent else "-",
        megabytes(counted[-1]["bytes_predicted"], 3),
    )


def _seconds(at: Figures) -> str:
    return f"{at['seconds']:.2f}"


def _share(name: str, at: Figures) -> str:
    return f"{at['utilisation']:.1%}" if exchanges(name) else "-"


def _title(report: Report) -> str:
    model, runs = report["model"], report["runs"]
    rates = ", ".join(f"{min(run['measured_mbit']):,.0f}" for run in runs.values())
    torch = f", PyTorch {report['torch']}" if "torch" in report else ""
    return (
        f"Training steps of a GPT of {report['parameters'] / 1e6:.1f} M parameters "
        f"({model['layers']} x {model['width']}, {model['batch']} x {model['length']} tokens a "
        f"process and step, AdamW with clipping where no other is named), one process in each "
        f"network namespace of a machine with {report['cores']} cores ({report['device']}, jax "
        f"{report['jax']}{torch}, load {report['load']:g} as it began; plain TCP reaches {rates} "
        "Mbit/s): mean seconds a step over whole rounds, slowest process; share of it that the "
        "same step takes without exchange in as many processes; MB that a process sends a step, "
        "at its interface on the last link and as predicted"
    )
