"""Tables and the picture of `benchmarks.targets.largest_batch`.

>>> ways = {FULL: {"batch": 10, "flops": 1.33}, PLAN: {"batch": 10, "flops": 1.2}}
>>> list(beaten({"rows": {"gpt h100": {"ways": ways}}}))
[]
>>> list(beaten({"rows": {"gpt h100": {"ways": ways | {DOTS: {"batch": 11, "flops": 1.4}}}}}))
['gpt h100: dots_with_no_batch_dims_saveable fits 11 (1.400), the plan 10 (1.200)']
"""

import functools
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks._lib.examples import pictures
from benchmarks._lib.report import Report
from benchmarks._lib.table import Row, Table
from benchmarks._private import seconds_text
from benchmarks.targets._models import DOTS, FULL, MAXTEXT, PLAIN

PLAN = "jrc.plan"
Found = Mapping[str, Any]
_BEST = "MaxText's best"
_NAMES = {PLAIN: "baseline", FULL: "every block", DOTS: "JAX's dots", _BEST: _BEST, PLAN: PLAN}
_COLOURS = {
    PLAIN: pictures.GREY, FULL: pictures.GREEN, DOTS: pictures.PURPLE, _BEST: pictures.RED,
    PLAN: pictures.BLUE,
}  # fmt: skip
_BRIEF = (PLAIN, FULL, PLAN)
_ROUNDING = 1e-6
_NO_GAIN = 1.1  # modelled seconds of two programs are no better known
_GROUP = 0.55  # inches for the bars of a row


def tables(report: Report) -> list[Table]:
    """Return one row for each model and target, the smallest model first."""
    rows = [_row(row) for row in _by_size(report) if PLAN in row["ways"]]
    title = (
        "Largest batch of all devices together, in brackets FLOPs over those with nothing "
        "recomputed: the baseline, every block under `jax.checkpoint`, "
        "`dots_with_no_batch_dims_saveable`, of MaxText's policies that were compiled the one with "
        "the largest batch, and `jrc.plan`; behind them examples a second, by the seconds that jrc "
        "states for the compiled program, where they were measured; time and compilations of "
        "`jrc.largest_batch` on two CPU cores that other work shared"
    )
    note = (
        "Compiled for one device of the target, nothing run; `value_and_grad` of the loss, "
        "float32 parameters, bfloat16 in the loss; budget: nine tenths of a device's memory less "
        "AdamW's two float32 moments. GPT-2: 1,024 tokens, its head untied. Llama: 2,048 tokens. "
        "ViT-L/16 and ResNet-50: 224 x 224. Batches are multiples of the step. On several devices "
        "FSDP over all, the ResNet's parameters on each. “-”: parameters, gradients and moments "
        "alone do not fit."
    )
    heads = ("", "target", "step", "nothing", "every block", "dots", "MaxText", "plan", "search")
    return [Table(title, heads, rows, note)]


def brief(report: Report) -> list[Table]:
    """Return the rows of which a batch fits, with fewer columns."""
    rows = [
        (row["model"], row["target"], *(_cell(row, row["ways"].get(way)) for way in _BRIEF))
        for row in _by_size(report)
        if row["ways"].get(PLAN, {}).get("batch")
    ]
    heads = ("", "target", *(_NAMES[way] for way in _BRIEF[:-1]), "`jrc.largest_batch`")
    return [Table("", heads, rows)]


def _by_size(report: Report) -> list[Found]:
    return sorted(report["rows"].values(), key=lambda row: (row["parameters"], row["devices"]))


def _row(row: Found) -> Row:
    ways = row["ways"] | {_BEST: _best(row)}
    cells = [_cell(row, ways.get(way)) for way in (PLAIN, FULL, DOTS)]
    name = ways[_BEST] and f" {ways[_BEST]['name']}"
    maxtext = _cell(row, ways[_BEST]) + (name or "")
    plan = ways[PLAN]
    search = ""
    if plan["compilations"]:
        search = f"{seconds_text(plan['seconds'])}, {plan['compilations']} compilations"
    title = f"{row['model']}, {row['parameters'] / 1e6:,.0f} M"
    return (title, row["target"], str(row["step"]), *cells, maxtext, _cell(row, plan), search)


def _cell(row: Found, found: Found | None) -> str:
    if not found:
        return ""
    if not found["batch"]:
        return "-" if row.get("held", 0) > row.get("memory", 0) else "0"
    return f"{found['batch']:,} ({found['flops']:.3f}){rate_text(found)}"


def rate_text(found: Found) -> str:
    """Return the examples a second of a batch, as text behind it; empty where none are known."""
    rate = found.get("per_second")
    return f", {rate:,.0f}/s" if rate else ""


def _best(row: Found) -> dict[str, Any] | None:
    """Return the policy of MaxText with the largest batch, of equal ones that of fewest FLOPs."""
    found = [row["ways"][way] | {"name": way} for way in MAXTEXT if way in row["ways"]]
    fits = [way for way in found if way["batch"]]
    return max(fits, key=lambda way: (way["batch"], -way["flops"]), default=None)


def beaten(report: Report) -> Iterator[str]:
    """Yield the ways by hand with a larger batch than the plan, or as large and cheaper.

    Cheaper is more examples a second, where they are known of both, or else fewer FLOPs.
    """
    for key, row in report["rows"].items():
        plan = row["ways"].get(PLAN)
        for way, found in row["ways"].items():
            if plan is None or not found["batch"]:
                continue
            same = found["batch"] == plan["batch"]
            if found["batch"] > plan["batch"] or (same and _is_cheaper(found, plan)):
                yield f"{key}: {way} fits {_cell(row, found)}, the plan {_cell(row, plan)}"


def _is_cheaper(found: Found, plan: Found) -> bool:
    one, other = found.get("per_second"), plan.get("per_second")
    if one and other:
        return one > other * _NO_GAIN
    return found["flops"] < plan["flops"] * (1 - _ROUNDING)


def plot(report: Report, folder: pathlib.Path) -> pathlib.Path | None:
    """Write `targets.png`: bars for each model and target; None without matplotlib or rows."""
    rows = [row for row in _by_size(report) if row["ways"].get(PLAN, {}).get("batch")]
    if not rows:
        return None
    title = "Largest batch over that of every block recomputed"
    caption = "Numbers: the batch of all devices, and in brackets FLOPs over those of the baseline."
    size = (10, 1.2 + len(rows) * _GROUP)
    panel = functools.partial(_panel, rows=rows[::-1])  # the first row on top
    return pictures.draw(folder / "targets.png", title, [panel], size, caption, columns=1)


def _panel(axes: Any, rows: list[Found]) -> None:
    """Draw a group of bars for each model on a target."""
    bars = [_bars_of(row) for row in rows]
    lengths = [length for each in bars for length, _ in each.values() if length]
    start = 0.7 * min(lengths)
    for at, found in enumerate(bars):
        height = 0.85 / len(found)
        for place, (way, (length, text)) in enumerate(found.items()):
            y = at + 0.425 - (place + 0.5) * height
            if length:
                axes.barh(y, length - start, height, left=start, color=_COLOURS[way])
            axes.text(max(length, start) * 1.03, y, text, va="center", fontsize=7)
    for way, name in _NAMES.items():
        if any(way in found for found in bars):
            axes.barh([0], [0], label=name, color=_COLOURS[way])
    axes.set_yticks(range(len(rows)), [f"{row['model']}, {row['target']}" for row in rows])
    axes.set_xscale("log")
    axes.set(xlabel="batch, ratio", xlim=(start, 2 * max(lengths)), ylim=(-0.6, len(rows) - 0.4))
    ticks = [x for x in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if x > start]
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.minorticks_off()
    axes.grid(axis="y", visible=False)
    axes.legend(ncols=len(_NAMES), loc="lower left", bbox_to_anchor=(-0.1, 1.0), columnspacing=1.0)


def _bars_of(row: Found) -> dict[str, tuple[float, str]]:
    """Of each way that was measured how long its bar is, and the text beside it."""
    ways, found = row["ways"] | {_BEST: _best(row)}, {}
    base = (ways.get(FULL) or ways[PLAN])["batch"] or ways[PLAN]["batch"]
    for way in _NAMES:
        if each := ways.get(way):
            flops = f" ({each['flops']:.2f})" if each["batch"] else ""
            found[way] = each["batch"] / base, f"{each['batch']:,}{flops}"
    return found
