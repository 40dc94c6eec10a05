"""The tables of `benchmarks.memory.others`."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks._lib.report import Report
from benchmarks._lib.table import Table, mib
from benchmarks.memory._others.catalogue import package_of
from benchmarks.memory._zoo_tables import AIMS, beating, peak_and_cost, regrets

Figures = Mapping[str, Any]
SLACK = 1.01
"""How much more of its aim than a way by hand a plan may have, and of peak where it is leanest."""


def tables(report: Report) -> list[Table]:
    """Return a table for each aim, with a row for each program, and the regrets."""
    models = {
        name: found
        for name, found in report["models"].items()
        if "peak" in found["by_hand"].get("nothing", {})
    }
    aims = [
        aim
        for aim in AIMS
        if any(key.startswith(aim) for found in models.values() for key in found["plans"])
    ]
    return [*(_table(models, aim, report) for aim in aims), *regrets(report, "other packages")]


def _table(models: Mapping[str, Figures], aim: str, report: Report) -> Table:
    device = report.get("target") or report["device"]
    cost = {"time": "seconds as jrc states them", "flops": "FLOPs"}[aim]
    title = (
        f'`jrc.plan(..., minimize="{aim}")` on programs of others ({device}, jax {report["jax"]}): '
        f"compiled peak, MiB, and in brackets {cost} over those of the program as written; under "
        "`jax.checkpoint` around each block or step; with `dots_saveable` over each block, or over "
        "the whole; as the authors recompute; plans at fractions of the range of peaks; the plan "
        "within the peak of the authors' way, or of each block where they offer none; ways by hand "
        "that beat a plan by more than 1 %"
    )
    heads = (
        "", "as written", "each block", "dots", "authors", "0.5", "0.25", "least", "same peak",
        "beaten by",
    )  # fmt: skip
    rows = [
        _row(name, found, aim)
        for name, found in models.items()
        if any(key.startswith(aim) for key in found["plans"])
    ]
    plans = [
        row
        for found in models.values()
        for key, row in found["plans"].items()
        if key.startswith(aim) and "peak" in row
    ]
    seconds = sorted(row["seconds"] for row in plans)
    note = (
        f"Planning took {seconds[len(seconds) // 2]:.0f} s a plan (median; most: "
        f"{seconds[-1]:.0f} s)."
        if seconds
        else ""
    )
    return Table(title, heads, rows, note)


def _row(name: str, found: Figures, aim: str) -> Sequence[str]:
    hand, plans, figure = found["by_hand"], found["plans"], AIMS[aim][0]
    base = hand["nothing"]
    authors = authors_way(hand)
    same = plans.get(f"{aim}, {authors or 'each block'}")
    dots = hand.get("dots of each block", hand.get("dots"))
    keys = [key for key in plans if key.startswith(aim)]
    beating_ways = beating(found, SLACK)
    beaten = [
        f"{way} ({key.partition(', ')[2]})" for key in keys for way in beating_ways.get(key, ())
    ]
    cells = [
        hand.get("each block"), dots, hand.get(authors),
        *(plans.get(f"{aim}, {budget}") for budget in ("0.5", "0.25", "0.0")), same,
    ]  # fmt: skip
    return (
        f"{name} ({package_of(name)})",
        mib(base["peak"], 1),
        *(peak_and_cost(row, base, figure) for row in cells),
        "; ".join(beaten) or "-",
    )


def authors_way(hand: Figures) -> str:
    """Return the name of the authors' leanest way; empty where they offer none."""
    offered = [way for way, row in hand.items() if way.startswith("authors") and "peak" in row]
    return min(offered, key=lambda way: hand[way]["peak"], default="")
