"""The tables of `benchmarks.pytorch.saved_bytes`."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks._lib.report import Report
from benchmarks._lib.table import Table, megabytes

HEADS = ("saved", "products", "jrc's least", "products", "difference")


def tables(report: Report) -> list[Table]:
    """Return PyTorch's ways beside jrc, where PyTorch was measured, then jrc's own."""
    own = Table(_own_title(report), ("", "peak", *HEADS), list(_own(report)))
    if "ways" not in report:
        return [own]
    beside = Table(_title(report), ("", "found by", *HEADS), list(_beside(report)))
    lacking = [(name, row["missing"]) for name, row in report["ways"].items() if "missing" in row]
    missing = [Table("Not in this PyTorch", ("", ""), lacking)] if lacking else []
    return [beside, own, *missing]


def ratio(row: Mapping[str, Any], report: Report) -> float:
    """Return product FLOPs over those with nothing recomputed."""
    return row["product_flops"] / report["nothing"]["product_flops"]


def in_words(name: str) -> str:
    """Return the name of a PyTorch way in words."""
    what, _, size = name.partition(" ")
    if what == "checkpoint":
        return "checkpoint of every block" if size == "1" else f"checkpoint of every {size} blocks"
    return "nothing re-run" if what == "eager" else name


def _title(report: Report) -> str:
    return (
        f"{report['model']}, float32, PyTorch {report['about']['torch']} on CPU (eager, "
        "`torch.utils.checkpoint`, `activation_memory_budget` with its default solver) beside "
        f"jrc's cheapest choice (jax {report['jax']}) that saves no more: MB (10⁶) that forward "
        "hands to backward, and matrix products over those with nothing re-run"
    )


def _beside(report: Report) -> Iterator[tuple[str, ...]]:
    for name, row in report["ways"].items():
        if "missing" not in row:
            yield in_words(name), _found_by(row), *_cells(row, report)


def _cells(row: Mapping[str, Any], report: Report) -> Iterator[str]:
    """Yield saved bytes and products, the same of jrc's cheapest choice, and the difference."""
    for each in (row, row["least"]):
        yield megabytes(each["saved"])
        yield f"{ratio(each, report):.4f}"
    yield f"{100 * (row['least']['product_flops'] / row['product_flops'] - 1):+.2f} %"


def _found_by(row: Mapping[str, Any]) -> str:
    if "knapsack" not in row:
        return "hand"
    return "knapsack" if row["knapsack"] else "a cut" if row["saved"] else "nothing kept"


def _own_title(report: Report) -> str:
    return (
        f"The same of `jrc.plan`, which weighs what the compiled program needs at its peak (MB, at "
        "fractions between the least and that of nothing re-run) and not what is saved, and of "
        f"`jax.checkpoint` by hand, {report['model']} ({report['device']}, jax {report['jax']})"
    )


def _own(report: Report) -> Iterator[tuple[str, ...]]:
    for row in report["plans"]:
        yield f"a plan at {row['budget']:g}", megabytes(row["peak"]), *_cells(row, report)
    for name, row in report["hand"].items():
        yield f"by hand: {name}", "-", *_cells(row, report)
