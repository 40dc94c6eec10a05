"""The results of `peers.py` as tables, for a terminal and for the README."""

from collections.abc import Iterator, Mapping
from typing import Any

Rows = list[tuple[str, ...]]
MB = 10**6


def tables(report: Mapping[str, Any]) -> list[tuple[str, Rows]]:
    """PyTorch's ways beside jrc, if it was there; then jrc's own."""
    columns = ("saved", "products", "jrc's least", "products", "difference")
    own = (_own_title(report), [("", "peak", *columns), *_own(report)])
    if "ways" not in report:
        return [own]
    return [(_title(report), [("", "found by", *columns), *_beside(report)]), own]


def ratio(row: Mapping[str, Any], report: Mapping[str, Any]) -> float:
    return row["product_flops"] / report["nothing"]["product_flops"]


def mb(count: int) -> str:
    return f"{count / MB:,.1f}"


def words(name: str) -> str:
    """A way of PyTorch, for a reader."""
    what, _, size = name.partition(" ")
    if what == "checkpoint":
        return "checkpoint of every block" if size == "1" else f"checkpoint of every {size} blocks"
    return "nothing re-run" if what == "eager" else name


def _title(report: Mapping[str, Any]) -> str:
    return (
        f"{report['model']}, float32, PyTorch {report['about']['torch']} on CPU (eager, "
        "`torch.utils.checkpoint`, `activation_memory_budget` with its default solver) beside "
        f"jrc's cheapest choice (jax {report['jax']}) that saves no more: MB (10⁶) that forward "
        "hands to backward, and matrix products over those with nothing re-run"
    )


def _beside(report: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, row in report["ways"].items():
        if "missing" not in row:
            yield words(name), _found_by(row), *_cells(row, report)


def _cells(row: Mapping[str, Any], report: Mapping[str, Any]) -> Iterator[str]:
    """Saved and products, the same of jrc's cheapest choice, and what lies between them."""
    for each in (row, row["least"]):
        yield mb(each["saved"])
        yield f"{ratio(each, report):.4f}"
    yield f"{100 * (row['least']['product_flops'] / row['product_flops'] - 1):+.2f} %"


def _found_by(row: Mapping[str, Any]) -> str:
    if "knapsack" not in row:
        return "hand"
    return "knapsack" if row["knapsack"] else "a cut" if row["saved"] else "nothing kept"


def _own_title(report: Mapping[str, Any]) -> str:
    return (
        f"The same of `jrc.plan`, which weighs what the compiled program needs at its peak (MB, at "
        "fractions between the least and that of nothing re-run) and not what is saved, and of "
        f"`jax.checkpoint` by hand, {report['model']} ({report['device']}, jax {report['jax']})"
    )


def _own(report: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for row in report["plans"]:
        yield f"a plan at {row['budget']:g}", mb(row["peak"]), *_cells(row, report)
    for name, row in report["hand"].items():
        yield f"by hand: {name}", "-", *_cells(row, report)
