"""The picture of `convergence.py`: held-out loss against bytes, a panel for each task."""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks._lib.examples import pyplot
from benchmarks.convergence._tables import bytes_text

# One of four replicas; those of eight lie close by.
SHOWN = {"dense_4": ("dense", "#6b7280"), "dgc_4": ("DGC 99.9 %", "#0f62fe")}
INK, PALE = "#1f2933", "#e5e7eb"


def plot(report: Mapping[str, Any], folder: pathlib.Path) -> pathlib.Path | None:
    """Write `convergence.png`; `None` without matplotlib or without both methods' runs."""
    tasks = [task for task in report["tasks"].values() if all(map(task["runs"].get, SHOWN))]
    if not tasks or (plt := pyplot()) is None:
        return None
    style = {"font.size": 12, "axes.edgecolor": "#9aa5b1", "text.color": INK}
    with plt.rc_context(style):
        figure, row = plt.subplots(
            1, len(tasks), figsize=(16 / 3 * len(tasks), 5), layout="constrained", squeeze=False
        )
        figure.get_layout_engine().set(wspace=0.06)
        for axes, task in zip(row[0], tasks, strict=True):
            _panel(axes, task)
        said = "Held-out loss against what each of 4 replicas has sent"
        figure.suptitle(said, fontsize=15, weight="bold", x=0.01, ha="left")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "convergence.png"
        figure.savefig(path, dpi=100)
        plt.close(figure)
    return path


def _panel(axes: Any, task: Mapping[str, Any]) -> None:
    ends = {}
    for name, (label, colour) in SHOWN.items():
        sent, losses = curves(task["runs"][name])
        middle = losses.mean(0)
        axes.fill_between(sent, losses.min(0), losses.max(0), color=colour, alpha=0.18, lw=0)
        axes.plot(sent, middle, color=colour, lw=2.4, solid_capstyle="round")
        axes.plot(sent[-1], middle[-1], "o", color=colour, ms=7)
        ends[name] = (sent[-1], middle[-1])
        # DGC ends left of dense, and each has its words on its own side.
        side = -1 if name == "dgc_4" else 1
        axes.annotate(
            f"{label}\n{middle[-1]:#.3g}", ends[name], xytext=(13 * side, 0),
            textcoords="offset points", ha="right" if side < 0 else "left", va="center",
            color=colour, weight="bold",
        )  # fmt: skip
    # Losses of images fall by orders of magnitude.
    axes.set_yscale("log" if task["metric"] == "accuracy" else "linear")
    axes.set_xscale("log")
    axes.margins(x=0.1, y=0.18)
    axes.set_xlim(right=5 * ends["dense_4"][0])
    _arrow(axes, ends)
    axes.xaxis.set_major_formatter(lambda x, _: bytes_text(x))
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axes.set_title(task["title"], fontsize=12, loc="left", pad=10)
    axes.set(xlabel="bytes sent by a replica", ylabel=f"held-out loss, {task['unit']}")
    axes.grid(color=PALE, lw=0.8)
    axes.tick_params(which="minor", length=0)
    axes.spines[["top", "right"]].set_visible(False)


def _arrow(axes: Any, ends: Mapping[str, tuple[float, float]]) -> None:
    """From the end of the dense run back to that of DGC, along the lower edge."""
    (dense, _), (dgc, _) = ends["dense_4"], ends["dgc_4"]
    across = axes.get_xaxis_transform()
    style = {"arrowstyle": "->", "color": INK, "lw": 1.2}
    axes.annotate("", (dgc, 0.03), (dense, 0.03), xycoords=across, arrowprops=style)
    axes.text(
        np.sqrt(dense * dgc), 0.04, f"1/{dense / dgc:.0f} of the bytes", transform=across,
        ha="center", va="bottom",
    )  # fmt: skip


def curves(runs: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes at every evaluation after the start, and the losses `(seeds, evaluations)`."""
    points = [[(p["bytes"], p["loss"]) for p in run["curve"][1:]] for run in runs.values()]
    table = np.asarray(points)
    return table[0, :, 0], table[:, :, 1]
