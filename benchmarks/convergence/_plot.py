"""The picture of `benchmarks.convergence.train`: held-out loss against bytes sent, by task."""

import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks._lib.examples import pictures
from benchmarks._private import network_text

# One of four replicas; those of eight lie close by.
SHOWN = {"dense_4": ("dense", pictures.GREY), "dgc_4": ("DGC 99.9 %", pictures.BLUE)}


def plot(report: Mapping[str, Any], folder: pathlib.Path) -> pathlib.Path | None:
    """Write `convergence.png`; return None without matplotlib or without both methods' runs."""
    tasks = [task for task in report["tasks"].values() if all(map(task["runs"].get, SHOWN))]
    if not tasks:
        return None
    title = "Held-out loss against what each of 4 replicas has sent"
    panels = [functools.partial(_panel, task=task) for task in tasks]
    return pictures.draw(folder / "convergence.png", title, panels, (16 / 3, 5))


def _panel(axes: Any, task: Mapping[str, Any]) -> None:
    """Draw mean and range over the seeds of both methods."""
    ends = {}
    for name, (label, colour) in SHOWN.items():
        sent, losses = curves(task["runs"][name])
        middle = losses.mean(0)
        axes.fill_between(sent, losses.min(0), losses.max(0), color=colour, alpha=0.18, lw=0)
        axes.plot(sent, middle, color=colour, lw=2.4, solid_capstyle="round")
        axes.plot(sent[-1], middle[-1], "o", color=colour, ms=7)
        ends[name] = (sent[-1], middle[-1])
        # DGC ends left of dense; each label stands on its own side.
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
    axes.xaxis.set_major_formatter(lambda x, _: network_text(x))
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axes.set_title(task["title"], fontsize=12, loc="left", pad=10)
    axes.set(xlabel="bytes sent by a replica", ylabel=f"held-out loss, {task['unit']}")
    axes.tick_params(which="minor", length=0)


def _arrow(axes: Any, ends: Mapping[str, tuple[float, float]]) -> None:
    """Draw an arrow from the end of the dense run back to that of DGC, along the lower edge."""
    (dense, _), (dgc, _) = ends["dense_4"], ends["dgc_4"]
    across = axes.get_xaxis_transform()
    style = {"arrowstyle": "->", "color": pictures.INK, "lw": 1.2}
    axes.annotate("", (dgc, 0.03), (dense, 0.03), xycoords=across, arrowprops=style)
    axes.text(
        np.sqrt(dense * dgc), 0.04, f"1/{dense / dgc:.0f} of the bytes", transform=across,
        ha="center", va="bottom",
    )  # fmt: skip


def curves(runs: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return bytes at each evaluation after the first, and the losses `(seeds, evaluations)`."""
    points = [[(p["bytes"], p["loss"]) for p in run["curve"][1:]] for run in runs.values()]
    table = np.asarray(points)
    return table[0, :, 0], table[:, :, 1]
