"""The picture of `benchmarks.convergence.outer`: held-out loss against bytes sent, by method."""

import functools
import pathlib
from collections.abc import Mapping
from typing import Any

from benchmarks._lib.examples import pictures
from benchmarks._private import network_text
from benchmarks.convergence._plot import curves

# Those whose ends lie apart; label, colour, and where the label stands.
SHOWN = {
    "adamw": ("AdamW, dense", pictures.GREY, "right"),
    "dgc": ("DGC 99.9 %, SGD", pictures.RED, "right"),
    "diloco_15": ("DiLoCo,\nevery 15", pictures.GREEN, "right"),
    "diloco_15_4bit": ("DiLoCo, 4 bits,\nevery 15", pictures.GREEN, "below right"),
    "sparseloco_5": ("SparseLoCo,\nevery 5", pictures.BLUE, "below right"),
    "sparseloco_15": ("SparseLoCo,\nevery 15", pictures.BLUE, "below left"),
    "sparseloco_30": ("SparseLoCo,\nevery 30", pictures.BLUE, "left"),
}
PLACES: Mapping[str, Any] = {
    "right": {"xytext": (9, 0), "ha": "left", "va": "center"},
    "left": {"xytext": (-9, 0), "ha": "right", "va": "center"},
    "below left": {"xytext": (6, -9), "ha": "right", "va": "top"},
    "below right": {"xytext": (-6, -9), "ha": "left", "va": "top"},
}


def plot(report: Mapping[str, Any], folder: pathlib.Path) -> pathlib.Path | None:
    """Write `outer.png`; return None without matplotlib or a seed that all methods have."""
    made = [set(runs) for name in SHOWN if (runs := report["runs"].get(name))]
    if not report["runs"].get("adamw") or not (seeds := set.intersection(*made)):
        return None
    mean = "one seed" if len(seeds) == 1 else f"mean of {len(seeds)} seeds"
    title = f"Held-out loss against what each of 4 replicas has sent, {mean}"
    panel = functools.partial(_panel, report=report)
    return pictures.draw(folder / "outer.png", title, [panel], (11, 5.5))


def _panel(axes: Any, report: Mapping[str, Any]) -> None:
    """Draw each method's mean over the seeds that all of them have."""
    ends, made = [], {name: report["runs"][name] for name in SHOWN if report["runs"].get(name)}
    seeds = set.intersection(*map(set, made.values()))
    for name, runs in made.items():
        label, colour, place = SHOWN[name]
        sent, losses = curves({seed: runs[seed] for seed in seeds})
        middle = losses.mean(0)
        seen = sent > 0
        axes.plot(sent[seen], middle[seen], color=colour, lw=2, alpha=0.75)
        axes.plot(sent[-1], middle[-1], "o", color=colour, ms=7)
        axes.annotate(
            f"{label}\n{middle[-1]:.3f}", (sent[-1], middle[-1]), textcoords="offset points",
            color=colour, weight="bold", **PLACES[place],
        )  # fmt: skip
        ends.append((sent[-1], middle[-1]))
    axes.axhline(ends[0][1], color=pictures.GREY, ls=":", lw=1.2)
    low, high = min(loss for _, loss in ends), max(loss for _, loss in ends)
    axes.set_ylim(low - 0.9 * (high - low), high + 2.5 * (high - low))
    axes.set_xscale("log")
    axes.set_xlim(left=min(sent for sent, _ in ends) / 40, right=12 * ends[0][0])
    axes.xaxis.set_major_formatter(lambda x, _: network_text(x))
    axes.set(xlabel="bytes sent by a replica", ylabel=f"held-out loss, {report['unit']}")
    axes.tick_params(which="minor", length=0)
