"""The tables of `benchmarks.pytorch.saved_bytes`."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks._lib.report import Report
from benchmarks._lib.table import Table, megabytes

Found = Mapping[str, Any]
Figures = Mapping[str, Any]
HEADS = ("saved", "products", "jrc's least", "products", "difference")


def tables(report: Report) -> list[Table]:
    """Return the tables of the GPT way by way, then one row for each other program.

    PyTorch's figures are left out where it was not measured.
    """
    models = report["models"]
    gpt = models.get("gpt")
    others = [found for name, found in models.items() if name != "gpt"]
    both = [found for found in others if "ways" in found]
    return [
        *(_of_one(gpt, report) if gpt else ()),
        *([_ways_of_all(both, report)] if both else ()),
        *([_plans_of_all(others, report)] if others else ()),
        *_missing(models),
    ]


def ratio(row: Figures, found: Found) -> float:
    """Return product FLOPs over those of the baseline."""
    return row["product_flops"] / found["nothing"]["product_flops"]


def difference(row: Figures) -> float:
    """Return by how much jrc's cheapest choice that saves no more has more products."""
    return row["least"]["product_flops"] / row["product_flops"] - 1


def in_words(name: str) -> str:
    """Return the name of a PyTorch way in words."""
    what, _, size = name.partition(" ")
    if what == "checkpoint":
        return "checkpoint of every block" if size == "1" else f"checkpoint of every {size} blocks"
    return "baseline" if what == "eager" else name


def by_torch(found: Found, saved: int) -> Figures | None:
    """Return PyTorch's cheapest budget of those measured that saves no more bytes."""
    fitting = [
        row
        for name, row in found.get("ways", {}).items()
        if name.startswith("budget") and row.get("saved", saved + 1) <= saved
    ]
    return min(fitting, key=lambda row: row["product_flops"], default=None)


def _of_one(found: Found, report: Report) -> list[Table]:
    own = Table(_own_title(found, report), ("", "peak", *HEADS), list(_own(found)))
    if "ways" not in found:
        return [own]
    return [Table(_title(found, report), ("", "found by", *HEADS), list(_beside(found))), own]


def _title(found: Found, report: Report) -> str:
    return (
        f"{found['title']}, float32, PyTorch {found['about']['torch']} on CPU (eager, "
        "`torch.utils.checkpoint`, `activation_memory_budget` with its default solver) beside "
        f"jrc's cheapest choice (jax {report['jax']}) that saves no more: MB (10⁶) that forward "
        "hands to backward, and matrix products over those of the baseline"
    )


def _beside(found: Found) -> Iterator[tuple[str, ...]]:
    for name, row in found["ways"].items():
        if "missing" not in row:
            yield in_words(name), _found_by(row), *_cells(row, found)


def _cells(row: Figures, found: Found) -> Iterator[str]:
    """Yield saved bytes and products, the same of jrc's cheapest choice, and the difference."""
    for each in (row, row["least"]):
        yield megabytes(each["saved"])
        yield f"{ratio(each, found):.4f}"
    yield f"{100 * difference(row):+.2f} %"


def _found_by(row: Figures) -> str:
    if "knapsack" not in row:
        return "hand"
    return "knapsack" if row["knapsack"] else "a cut" if row["saved"] else "nothing kept"


def _own_title(found: Found, report: Report) -> str:
    return (
        f"The same of `jrc.plan`, which weighs what the compiled program needs at its peak (MB, at "
        "fractions between the least and that of the baseline) and not what is saved, and of "
        f"`jax.checkpoint` by hand, {found['title']} ({report['device']}, jax {report['jax']})"
    )


def _own(found: Found) -> Iterator[tuple[str, ...]]:
    for row in found["plans"]:
        yield f"a plan at {row['budget']:g}", megabytes(row["peak"]), *_cells(row, found)
    for name, row in found["hand"].items():
        yield f"by hand: {name}", "-", *_cells(row, found)


def _ways_of_all(models: list[Found], report: Report) -> Table:
    names = ("checkpoint 1", "budget 1.0", "budget 0.5", "budget 0.25")
    return Table(
        "Other programs, ways of PyTorch: MB that are saved, products over those of the "
        "baseline, and in brackets the difference of jrc's cheapest choice that saves no more "
        f"(PyTorch {models[0]['about']['torch']}, jax {report['jax']}, CPU, float32); the worst "
        "is of all ways that were measured",
        ("", *(in_words(name) for name in names), "worst"),
        [
            (
                found["title"],
                *(_cell(found["ways"].get(name), found, difference) for name in names),
                f"{100 * max(map(difference, _measured(found))):+.2f} %",
            )
            for found in models
        ],
    )


def _cell(row: Figures | None, found: Found, of: Callable[[Figures], float]) -> str:
    if row is None or "missing" in row:
        return "-"
    return f"{megabytes(row['saved'])}: {ratio(row, found):.3f} ({100 * of(row):+.2f} %)"


def _measured(found: Found) -> list[Figures]:
    return [row for row in found["ways"].values() if "missing" not in row]


def _plans_of_all(models: list[Found], report: Report) -> Table:
    budgets = list(dict.fromkeys(row["budget"] for found in models for row in found["plans"]))

    def cells(found: Found) -> Iterator[str]:
        rows = {row["budget"]: row for row in found["plans"]}
        for budget in budgets:
            yield _plan_cell(rows.get(budget), found)

    return Table(
        "The same programs, `jrc.plan`, which weighs the peak of the compiled program and not what "
        "is saved: MB that a plan saves, its products / those of PyTorch's cheapest measured "
        f"budget that saves no more / those of jrc's cheapest choice ({report['device']}, jax "
        f"{report['jax']})",
        ("", *(f"a plan at {budget:g}" for budget in budgets)),
        [(found["title"], *cells(found)) for found in models],
    )


def _plan_cell(row: Figures | None, found: Found) -> str:
    if row is None:
        return "-"
    theirs = by_torch(found, row["saved"])
    each = [f"{ratio(x, found):.3f}" if x else "-" for x in (row, theirs, row["least"])]
    return f"{megabytes(row['saved'])}: {' / '.join(each)}"


def _missing(models: Mapping[str, Found]) -> list[Table]:
    lacking = {
        name: row["missing"]
        for found in models.values()
        for name, row in found.get("ways", {}).items()
        if "missing" in row
    }
    return [Table("Not in this PyTorch", ("", ""), list(lacking.items()))] if lacking else []
