"""The picture of `peers.py`: saved bytes against the products that are run again."""

import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks._lib.examples import pyplot
from benchmarks.pytorch._tables import MB, ratio

JRC, TORCH, INK, PALE = "#0f62fe", "#d9480f", "#1f2933", "#e5e7eb"


def plot(report: Mapping[str, Any], folder: pathlib.Path) -> pathlib.Path | None:
    """Write `peers.png`; `None` without matplotlib."""
    if (plt := pyplot()) is None:
        return None
    style = {"font.size": 12, "axes.edgecolor": "#9aa5b1", "text.color": INK}
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(11, 6), layout="constrained")
        _lines(axes, report)
        _frame(axes, report)
        said = "Saved for the backward pass, against products run again"
        figure.suptitle(said, fontsize=15, weight="bold", x=0.01, ha="left")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "peers.png"
        figure.savefig(path, dpi=100)
        plt.close(figure)
    return path


def _lines(axes: Any, report: Mapping[str, Any]) -> None:
    ways = {name: row for name, row in report.get("ways", {}).items() if "saved" in row}
    budgets = {name: row for name, row in ways.items() if name.startswith("budget")}
    checkpoints = [row for name, row in ways.items() if name.startswith("checkpoint")]
    # Between two choices there is none: until the next one fits, the one before it is taken.
    axes.plot(
        *_points(report["front"], report), color=JRC, lw=2.4, drawstyle="steps-post",
        label="jrc, by saved bytes alone",
    )  # fmt: skip
    axes.plot(
        *_points(report["plans"], report), "o", color=JRC, mfc="white", mew=1.8, ms=7,
        label="jrc.plan, within a compiled peak",
    )  # fmt: skip
    hand = _points(report["hand"].values(), report)
    axes.plot(*hand, "x", color="#6b7280", ms=7, mew=2, label="jax.checkpoint by hand")
    if not ways:
        return
    axes.plot(
        *_points(budgets.values(), report), "o:", color=TORCH, lw=1.4, ms=7,
        label="PyTorch, activation_memory_budget",
    )  # fmt: skip
    axes.plot(
        *_points(checkpoints, report), "s", color=TORCH, mfc="white", mew=1.8, ms=8,
        label="PyTorch, torch.utils.checkpoint",
    )  # fmt: skip
    _names(axes, budgets, report)


def _points(rows: Iterable[Mapping[str, Any]], report: Mapping[str, Any]) -> tuple[Any, Any]:
    """Saved MB, and products run again in percent of all."""
    pairs = [(row["saved"] / MB, 100 * (ratio(row, report) - 1)) for row in rows]
    return tuple(zip(*pairs, strict=True)) or ((), ())


def _names(axes: Any, budgets: Mapping[str, Any], report: Mapping[str, Any]) -> None:
    """Each budget beside its point; those with the same point together."""
    points: dict[tuple[float, float], list[str]] = {}
    for name, row in budgets.items():
        (at,) = zip(*_points([row], report), strict=True)
        points.setdefault(at, []).append(name.removeprefix("budget "))
    for at, names in points.items():
        axes.annotate(
            ", ".join(names), at, xytext=(8, 7), textcoords="offset points", color=TORCH,
            fontsize=10,
        )  # fmt: skip


def _frame(axes: Any, report: Mapping[str, Any]) -> None:
    there = f", PyTorch {report['about']['torch']}" if "about" in report else ""
    axes.set_title(f"{report['model']}, float32, jax {report['jax']}{there}", fontsize=12,
                   loc="left", pad=10)  # fmt: skip
    axes.set(xlabel="saved bytes, MB", ylabel="matrix products run again, % more FLOPs")
    axes.grid(color=PALE, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
