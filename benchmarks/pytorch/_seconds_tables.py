"""The tables of `benchmarks.pytorch.seconds`."""

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks._lib.report import Report
from benchmarks._lib.table import Table, mib
from benchmarks._lib.timing import quartiles, ratios

_TORCH, _JAX = "PyTorch, ", "JAX, "


def tables(report: Report) -> list[Table]:
    """Return one table of all programs: each way of PyTorch, and JAX in as many bytes."""
    models = report["models"].values()
    versions = {row["torch"] for each in models for row in each["ways"].values() if "torch" in row}
    torch = f"PyTorch {', '.join(sorted(versions))}, " if versions else ""
    loads = [each["load"] for each in models]
    title = (
        f"A pass (loss and gradients, float32) on {report['cores']} CPU cores, {torch}jax "
        f"{report['jax']}, in turns, load {min(loads):.1f} to {max(loads):.1f}: seconds, median "
        "(quartiles), and MiB that a pass adds to resident memory; then the plan of jrc for as "
        "many bytes, and its seconds over those of PyTorch"
    )
    heads = ("", "seconds", "MiB", "plan: seconds", "plan: MiB", "plan / PyTorch")
    return [Table(title, heads, [row for each in models for row in _rows(each)])] if loads else []


def _rows(found: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    ways = found["ways"]
    yield f"**{found['title']}**", *[""] * 5
    for way, row in ways.items():
        if way.startswith(_TORCH):
            yield way, *_cells(row), *_beside(found, way, row)
    for way, row in ways.items():
        if way.startswith(_JAX) and not (any(w.startswith(_TORCH) for w in ways) and "plan" in way):
            yield way, *_cells(row), "", "", ""


def _cells(row: Mapping[str, Any]) -> tuple[str, str]:
    low, median, high = quartiles(row["seconds"])
    return f"{median:.3f} ({low:.3f}-{high:.3f})", mib(row["resident"])


def _beside(found: Mapping[str, Any], way: str, row: Mapping[str, Any]) -> tuple[str, str, str]:
    plan = found["plans"].get(way)
    if plan is None:
        return "none fits", "", ""
    if plan not in found["ways"]:
        return "failed", "", ""
    other = found["ways"][plan]
    ratio = statistics.median(ratios(other["seconds"], row["seconds"]))
    return *_cells(other), f"{ratio:.2f}"
