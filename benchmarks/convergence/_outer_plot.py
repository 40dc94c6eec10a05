"""The pictures of `benchmarks.convergence.outer`: held-out loss against bytes sent and time."""

import functools
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from benchmarks._lib.examples import pictures
from benchmarks._private import network_text, seconds_text
from benchmarks.convergence._outer_clock import LINKS, STEP_TIME, mean_losses, seconds_at
from benchmarks.convergence._outer_methods import by_replicas
from benchmarks.convergence._plot import curves

# Those whose ends lie apart; label, colour, line, and where the label stands.
SHOWN = {
    "adamw": ("AdamW, dense", pictures.GREY, "-", "right"),
    "dgc": ("DGC\n99.9 %,\nSGD", pictures.RED, "-", "right"),
    "diloco_15": ("DiLoCo,\nevery 15", pictures.GREEN, "-", "right below"),
    "diloco_15_4bit": ("DiLoCo,\n4 bits,\nevery 15", pictures.GREEN, "--", "right below"),
    "sparseloco_5": ("SparseLoCo,\nevery 5", pictures.BLUE, ":", "below right"),
    "sparseloco_15": ("SparseLoCo,\nevery 15", pictures.BLUE, "-", "far below left"),
    "sparseloco_30": ("SparseLoCo,\nevery 30", pictures.BLUE, "-.", "left below"),
}
PLACES: Mapping[str, Any] = {
    "right": {"xytext": (9, 0), "ha": "left", "va": "center"},
    "left below": {"xytext": (-14, 10), "ha": "right", "va": "top"},
    "far below left": {"xytext": (8, -20), "ha": "right", "va": "top"},
    "right below": {"xytext": (9, 8), "ha": "left", "va": "top"},
    "below right": {"xytext": (-6, -9), "ha": "left", "va": "top"},
}
Runs = Mapping[str, Mapping[str, Any]]


def plot(report: Mapping[str, Any], folder: pathlib.Path) -> pathlib.Path | None:
    """Write `outer.png` and `outer_time.png`; return the first.

    Each number of replicas has a panel. It shows the methods, AdamW among them, that have a seed in
    common. Without any, or without matplotlib, nothing is written.
    """
    shown = {count: made for count, each in by_replicas(report["runs"]).items()
             if (made := _shown(each))}  # fmt: skip
    if not shown:
        return None
    unit = report["unit"]
    sent = [functools.partial(_panel, runs=runs, unit=unit, title=_title(count, runs))
            for count, runs in shown.items()]  # fmt: skip
    times = [functools.partial(_times, runs=runs, unit=unit, link=link,
                               title=f"{_spaced(link)}, {_title(count, runs)}")
             for count, runs in shown.items() for link in LINKS]  # fmt: skip
    path = pictures.draw(
        folder / "outer.png", "Held-out loss against what a replica has sent", sent, (11, 5.5),
        columns=1,
    )  # fmt: skip
    title = f"Held-out loss against modelled time, {seconds_text(STEP_TIME)} of computation a step"
    pictures.draw(folder / "outer_time.png", title, times, (6.5, 5), columns=len(LINKS))
    return path


def _shown(methods: Runs) -> Runs | None:
    """Return the methods of the picture with the seeds that all have; None without them."""
    made = {name: methods[name] for name in SHOWN if name in methods}
    if "adamw" not in made or not (seeds := set.intersection(*map(set, made.values()))):
        return None
    return {name: {seed: runs[seed] for seed in sorted(seeds)} for name, runs in made.items()}


def _spaced(link: str) -> str:
    """A link of `tc` as text: `100 Mbit/s`."""
    return re.sub(r"(?<=\d)(?=[A-Z])", " ", link)


def _title(replicas: int, runs: Runs) -> str:
    seeds = len(runs["adamw"])
    return f"{replicas} replicas, {'one seed' if seeds == 1 else f'mean of {seeds} seeds'}"


def _panel(axes: Any, runs: Runs, unit: str, title: str) -> None:
    """Draw each method's mean over the seeds against bytes."""
    ends = []
    for name, seeds in runs.items():
        label, colour, line, place = SHOWN[name]
        sent, losses = curves(seeds)
        middle = losses.mean(0)
        seen = sent > 0
        axes.plot(sent[seen], middle[seen], line, color=colour, lw=2, alpha=0.75)
        axes.plot(sent[-1], middle[-1], "o", color=colour, ms=7)
        axes.annotate(
            f"{label}\n{middle[-1]:.3f}", (sent[-1], middle[-1]), textcoords="offset points",
            color=colour, weight="bold", **PLACES[place],
        )  # fmt: skip
        ends.append((sent[-1], middle[-1]))
    _frame(axes, ends, unit, title)
    axes.set_xscale("log")
    axes.set_xlim(left=min(sent for sent, _ in ends) / 40, right=12 * ends[0][0])
    axes.xaxis.set_major_formatter(lambda x, _: network_text(x))
    axes.set(xlabel="bytes sent by a replica")
    axes.tick_params(which="minor", length=0)


def _times(axes: Any, runs: Runs, unit: str, link: str, title: str) -> None:
    """Draw each method's mean over the seeds against modelled seconds on a link."""
    ends = []
    for name, seeds in runs.items():
        label, colour, line, _ = SHOWN[name]
        seconds = seconds_at(name, next(iter(seeds.values())), link)
        middle = mean_losses(seeds, list(seeds))
        axes.plot(seconds, middle, line, color=colour, lw=2, label=label.replace("\n", " "))
        axes.plot(seconds[-1], middle[-1], "o", color=colour, ms=6)
        ends.append((seconds[-1], middle[-1]))
    _frame(axes, ends, unit, title)
    axes.set_xscale("log")
    axes.set_xlim(left=min(end for end, _ in ends) / 10, right=4 * ends[0][0])
    axes.set_xticks([5, 10, 20, 50, 100, 200, 500], minor=False)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f} s")
    axes.xaxis.set_minor_formatter(lambda *_: "")
    axes.tick_params(which="minor", length=0)
    axes.set(xlabel="modelled time")
    if link == LINKS[0]:  # the lines mean the same in all panels of a row
        axes.legend(loc="upper right")


def _frame(axes: Any, ends: list[tuple[float, float]], unit: str, title: str) -> None:
    """Give a panel its title, dense's end as a line, and the losses near the ends."""
    axes.axhline(ends[0][1], color=pictures.GREY, ls=":", lw=1.2)
    low, high = min(loss for _, loss in ends), max(loss for _, loss in ends)
    reach = max(high - low, 0.01)
    axes.set_ylim(low - 0.9 * reach, high + 2.5 * reach)
    axes.set_title(title)
    axes.set(ylabel=f"held-out loss, {unit}")
