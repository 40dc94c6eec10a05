"""The tables of `benchmarks.memory.zoo`."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks._lib.report import Report
from benchmarks._lib.table import Table, mib
from benchmarks._private import seconds_text
from tests.zoo.catalogue import description

Figures = Mapping[str, Any]
LEANEST = "0.0"
# What a plan has the least of: the figure, and how much more of it a way by hand does not beat. A
# millionth of the FLOPs is one or two sums of the smallest values; `jrc.plan` takes the baseline
# where another program saves less than 0.5 % of the seconds.
AIMS = {"time": ("stated", 1.005), "flops": ("flops", 1 + 1e-6)}
# A ten-thousandth of the bytes is how XLA aligns a few buffers.
ALIGNMENT = 1e-4


def tables(report: Report) -> list[Table]:
    """Return one table for each program, then the summary."""
    models = report["models"]
    return [*(_program(name, found) for name, found in models.items()), *summary(report)]


def summary(report: Report) -> list[Table]:
    """Return a table for each aim, with a row for each measured program, and the regrets."""
    models = _measured(report)
    keys = list(dict.fromkeys(key for found in models.values() for key in found["plans"]))
    aims = [aim for aim in AIMS if any(key.startswith(aim) for key in keys)]
    device = report.get("target") or report["device"]
    found = []
    for aim in aims or ["flops"]:
        of_aim = [key for key in keys if key.startswith(aim)]
        planned = {
            name: each
            for name, each in models.items()
            if not each["plans"] or not each["plans"].keys().isdisjoint(of_aim)
        }
        found.append(_summary(planned, of_aim, aim, device, report["jax"]))
    return [*found, *regrets(report)]


def _measured(report: Report) -> dict[str, Figures]:
    """Return the programs whose baseline was compiled."""
    return {
        name: found
        for name, found in report["models"].items()
        if "peak" in found["by_hand"].get("nothing", {})
    }


def _summary(
    models: Mapping[str, Figures], keys: Sequence[str], aim: str, device: str, version: str
) -> Table:
    what = {"time": "seconds as jrc states them", "flops": "FLOPs"}[aim]
    title = (
        f'`jrc.plan(..., minimize="{aim}")` on the programs of `tests/zoo` ({device}, jax '
        f"{version}): compiled peak, MiB, and in brackets {what} over those of the program as it "
        "is written; under `jax.checkpoint` (or its package's own) around each block; plans at "
        "fractions of the range from the least peak to that of the baseline; which way by hand has "
        "less of them within the budget of a plan, or a lower peak than the leanest plan"
    )
    plans = [f"plan at {_budget(key)}" for key in keys]
    heads = ("", "as written", "each block", *plans, "beaten by", "")
    rows = [tuple(_row(name, found, keys, aim)) for name, found in models.items()]
    return Table(title, heads, rows, _note(list(models.values()), keys))


def regrets(report: Report, programs: str = "`tests/zoo`") -> list[Table]:
    """Return the regrets of plans at each budget over all programs; nothing without seconds.

    Args:
        report: Of this benchmark, or of `benchmarks.memory.others`.
        programs: Whose programs these are, for the title.
    """
    models = list(_measured(report).values())
    plans = {key for found in models for key, row in found["plans"].items() if row.get("stated")}
    if not plans:
        return []
    budgets = sorted({_budget(key) for key in plans if _is_fraction(key)}, key=float, reverse=True)
    rows = [
        (
            f"{aim}: {name}",
            str(sum(any(key.startswith(aim) for key in found["plans"]) for found in models)),
            *(_median_and_worst(models, f"{aim}, {b}", of) for b in budgets),
        )
        for aim in AIMS
        for name, of in (
            ("seconds", lambda found, key: regret(found, key, "stated")),
            ("FLOPs", lambda found, key: regret(found, key, "flops")),
            ("kernels over the baseline's", _kernels),
        )
        if any(key.startswith(aim) for key in plans)
    ]
    device = report.get("target") or report["device"]
    title = (
        "Plans of the least seconds and of the fewest FLOPs for programs of "
        f"{programs} ({device}), at fractions of the range of peaks: what a plan costs over the "
        "least of all ways by hand and of all plans within its budget, whatever these plans were "
        "made for, and the kernels of its compiled program over those of the baseline; median, and "
        "in brackets the worst"
    )
    failed = [row for found in models for row in found["plans"].values() if "peak" not in row]
    note = f"Plans that were refused or failed: {len(failed)}." if failed else ""
    return [Table(title, ("", "programs, at most", *budgets), rows, note)]


def regret(found: Figures, key: str, figure: str) -> float | None:
    """Return a figure of a plan over the least of all ways by hand and plans within its budget.

    `None` where the plan has no such figure.
    """
    plan = found["plans"].get(key, {})
    if not plan.get(figure):
        return None
    known = [*found["by_hand"].values(), *found["plans"].values()]
    fitting = [row for row in known if row.get("peak", 1e30) <= plan["budget"]]
    return plan[figure] / min([plan[figure], *(row[figure] for row in fitting if row.get(figure))])


def _kernels(found: Figures, key: str) -> float | None:
    kernels = found["plans"].get(key, {}).get("kernels")
    return kernels and kernels / found["by_hand"]["nothing"]["kernels"]


def _median_and_worst(models: Sequence[Figures], key: str, of: Any) -> str:
    values = [value for found in models if (value := of(found, key))]
    return f"{statistics.median(values):.3f} ({max(values):.3f})" if values else ""


def beating(found: Figures, slack: float | None = None) -> dict[str, list[str]]:
    """Return for each plan the ways by hand that beat it.

    Of every plan: a lower cost within the budget that it was asked for, of which the plan may use
    less. Of the leanest: a lower peak too.

    Args:
        found: The figures of a program.
        slack: How many times the cost of a way by hand a plan may have, and of its peak where it is
            the leanest. By default what `AIMS` has for its cost, and alignment for its peak.
    """
    rows = {name: row for name, row in found["by_hand"].items() if "peak" in row}
    beaten = {}
    for key, plan in found["plans"].items():
        if "peak" not in plan:
            continue
        figure, usual = AIMS[key.partition(",")[0]]
        of_cost, of_peak = (slack, slack) if slack else (usual, 1 + ALIGNMENT)
        beaten[key] = [
            name
            for name, row in rows.items()
            if (row["peak"] <= plan["budget"] and _is_less(row, plan, figure, of_cost))
            or (_budget(key) == LEANEST and _is_less(row, plan, "peak", of_peak))
        ]
    return beaten


def _is_less(row: Figures, plan: Figures, figure: str, slack: float) -> bool:
    one, other = row.get(figure), plan.get(figure)
    return bool(one and other and one * slack < other)


def _budget(key: str) -> str:
    return key.partition(", ")[2]


def _is_fraction(key: str) -> bool:
    """Return whether a plan has a fraction for a budget, and not what a way by hand needs."""
    return _budget(key)[0].isdigit()


def _program(name: str, found: Figures) -> Table:
    base = found["by_hand"]["nothing"]
    rows = [_cells(way, row, base, "") for way, row in found["by_hand"].items()]
    beaten = beating(found)
    for key, row in found["plans"].items():
        rows.append(_cells(f"plan, {key}", row, base, ", ".join(beaten.get(key, ()))))
    heads = (
        "", "predicted", "peak", "FLOPs", "time", "kernels", "barriers", "seconds", "compiled",
        "gradients", "",
    )  # fmt: skip
    title = (
        f"{name}: MiB; FLOPs as a ratio; time as jrc states it; kernels of the compiled program "
        "and barriers of the lowered one; seconds of planning; last the ways that beat it"
    )
    return Table(title, heads, rows)


def _cells(name: str, row: Figures, base: Figures, beats: str) -> tuple[str, ...]:
    if "peak" not in row:
        return (name, *[""] * 9, row.get("error", "")[:60])
    flops = f"{row['flops'] / base['flops']:.3f}" if "flops" in base else ""
    return (
        name,
        mib(row["predicted_peak"], 2) if "predicted_peak" in row else "",
        mib(row["peak"], 2),
        flops,
        seconds_text(row["stated"]) if row.get("stated") else "",
        str(row.get("kernels", "")),
        str(row.get("barriers", "")),
        f"{row['seconds']:.1f}" if "seconds" in row else "",
        str(row.get("compilations", "")),
        f"{row['gradients_differ']:.0e}" if "gradients_differ" in row else "",
        beats,
    )


def _row(name: str, found: Figures, keys: Sequence[str], aim: str) -> Iterator[str]:
    hand, plans = found["by_hand"], found["plans"]
    yield name
    yield mib(hand["nothing"]["peak"], 1)
    for row in (hand.get("each block"), *map(plans.get, keys)):
        yield peak_and_cost(row, hand["nothing"], AIMS[aim][0])
    beaten = {key: names for key, names in beating(found).items() if key in keys}
    ways = [f"{way} (at {_budget(key)})" for key, names in beaten.items() for way in names]
    yield ", ".join(ways) or "-"
    yield description(name)


def peak_and_cost(row: Figures | None, base: Figures, figure: str) -> str:
    """Return a peak in MiB, and in brackets a figure over that of the baseline."""
    if row is None:
        return "-"
    if "peak" not in row:
        return "failed"
    known = row.get(figure) and base.get(figure)
    return mib(row["peak"], 1) + (f" ({row[figure] / base[figure]:.3f})" if known else "")


def _note(models: Sequence[Figures], keys: Sequence[str]) -> str:
    plans = [
        found["plans"][key]
        for found in models
        for key in keys
        if "peak" in found["plans"].get(key, {})
    ]
    if not plans:
        return ""
    errors = [abs(row["predicted_peak"] / row["peak"] - 1) for row in plans]
    seconds = statistics.median(row["seconds"] for row in plans)
    compiled = statistics.median(row["compilations"] for row in plans)
    return (
        f"Predicted against compiled peak of these {len(plans)} plans: off by "
        f"{statistics.median(errors):.1%} (median), {max(errors):.1%} (worst); a plan takes "
        f"{seconds:.0f} s and {compiled:g} compilations (medians)."
    )
