"""The tables of `benchmarks.memory.plan`."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks._lib.report import Report
from benchmarks._lib.table import Table, mib
from benchmarks._private import memory_text
from benchmarks.memory._plan_checks import cheaper_by_hand, rises

Figures = Mapping[str, Any]


def tables(report: Report) -> list[Table]:
    """Return the summary of all models and, for a terminal, every program of each model."""
    models = [_programs(found) for found in report["models"].values()]
    return [*models, *summary(report)]


def summary(report: Report) -> list[Table]:
    """Return one row for each model, and real memory where it was measured."""
    planned = [found for found in report["models"].values() if "budgets" in found]
    resident = [found for found in planned if "rss" in found]
    found = []
    if planned:
        found.append(_summary(report, planned))
    if resident:
        found.append(_resident(resident))
    return found


def _summary(report: Report, models: list[Figures]) -> Table:
    title = (
        f'`jrc.plan` with `minimize="flops"` ({report["device"]}, jax {report["jax"]}): peak of '
        "the baseline and the "
        "least reachable one, MiB; FLOPs, as a ratio, at the least peak, with half and with a "
        "quarter of the temporaries; budgets exceeded; ways by hand that a plan within their peak "
        "equals (to 0.0005) or beats in FLOPs; budgets whose plan costs more than a smaller one's, "
        "and at worst; compilations at most; tracing and solving without them"
    )
    heads = ("", "peak", "least", "FLOPs there", "half", "quarter", "exceeded", "by hand",
             "dearer", "compiled", "planned in")  # fmt: skip
    return Table(title, heads, [tuple(_summary_row(model)) for model in models])


def _summary_row(model: Figures) -> Iterator[str]:
    base, beside, ways = model["baseline"], model["beside"], model["references"]
    fitting = [row for row in model["budgets"] if row.get("peak", 0) > 0]
    yield model["title"]
    yield mib(base["peak"])
    yield mib(model["least"])
    for row in (fitting[0], beside["half"], beside["quarter"]):
        yield f"{row['flops'] / base['flops']:.3f}" if "peak" in row else "none"
    yield f"{sum(row['peak'] > row['budget'] for row in fitting)} of {len(fitting)}"
    yield f"{len(ways) - len(cheaper_by_hand(model))} of {len(ways)}"
    dearer = rises(model)
    yield f"{len(dearer)}, {max(rise for _, rise in dearer):.4f}" if dearer else "0"
    yield str(max(row["compilations"] for row in fitting))
    yield f"{model['seconds']:.1f} s"


def _resident(models: list[Figures]) -> Table:
    title = (
        "Resident memory of a process that runs the gradient program, above what it has before "
        "(a plan at a quarter between the least peak and that of the baseline)"
    )

    def grown(found: Figures) -> str:
        return memory_text(found["most"] - found["start"])

    rows = [
        (model["title"], *(grown(model["rss"][key]) for key in ("plain", "planned")))
        for model in models
    ]
    return Table(title, ("", "baseline", "planned"), rows)


def _programs(found: Figures) -> Table:
    """Return the table of one model: by hand, beside it the plan, then the plans by budget."""
    base, beside = found["baseline"], found.get("beside", {})
    rows = []
    for name, row in {"baseline": base, **found["references"]}.items():
        rows.append(_cells(name, row, base))
        if "peak" in (plan := beside.get(name, {})):
            rows.append(_cells("  the plan within this", plan, base))
    for name in ("half", "quarter"):
        if "peak" in (plan := beside.get(name, {})):
            rows.append(_cells(f"the plan for {name} the temporaries", plan, base))
    for row in _different(found.get("budgets", ())):
        rows.append(_cells(f"the plan within {mib(row['budget'], 1)}", row, base))
    heads = ("", "peak", "temporaries", "saved", "FLOPs", "products", "compile")
    return Table(f"{found['title']}: MiB, ratios, seconds", heads, rows)


def _different(rows: Any) -> Iterator[Figures]:
    """Yield each plan once, at the smallest budget that it was made for."""
    last = None
    for row in rows:
        if "peak" in row and (now := (row["peak"], row["flops"])) != last:
            last = now
            yield row


def _cells(name: str, row: Figures, base: Figures) -> tuple[str, ...]:
    return (
        name,
        *(mib(row[key], 1) for key in ("peak", "temporaries", "saved")),
        *(f"{row[key] / base[key]:.3f}" for key in ("flops", "product_flops")),
        f"{row['compile_seconds']:.1f}",
    )
