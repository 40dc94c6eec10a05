"""The tables of `benchmarks.convergence.train`, and how a method is judged against dense."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks._lib.table import Row, Table
from benchmarks._private import network_text

Task, Runs = Mapping[str, Any], Mapping[str, Any]
BYTES = "bytes_sent", "bytes_dense"

# Lin et al. 2018 (arXiv 1712.01887): tables 2 and 4.
PAPER_HEADS = ("", "N", "momentum SGD", "DGC 99.9 %", "difference", "gradient of a step")
PAPER = [
    ("ResNet-110 on CIFAR-10, accuracy", "4", "93.75 %", "93.87 %", "+0.12", "-"),
    ("LSTM 2 x 1500 on Penn Treebank, perplexity", "4", "72.30", "72.24", "-0.06", "1/462"),
]
HEADS = ("", "N", "mean", "range", "to dense", "dense range", "training", "to dense", "sent",
         "last step", "density")  # fmt: skip
PAPER_TITLE = (
    "The paper's figures (Lin et al. 2018, arXiv 1712.01887). There batches grow with the "
    "replicas (128 images for four), a run has 164 epochs of CIFAR-10 or 40 of Penn Treebank, the "
    "LSTM predicts words and has no momentum, and bytes are those of a step's gradient. Here the "
    "whole batch is the same for 4 and 8 replicas, networks and data are small, runs short, models "
    "predict bytes, and what is sent counts whole runs, warm-up included, in ring algorithms"
)


def tables(report: Mapping[str, Any]) -> list[Table]:
    """Return a table for each task that has runs, then the paper's."""
    found = []
    for task in (task for task in report["tasks"].values() if task["runs"]):
        rows = [_row(task, name) for name, runs in task["runs"].items() if runs]
        found.append(Table(_title(task), HEADS, rows))
    return [*found, Table(PAPER_TITLE, PAPER_HEADS, PAPER)] if found else []


def _title(task: Task) -> str:
    settings = task["settings"]
    first = next(record for seeds in task["runs"].values() for record in seeds.values())
    seeds = sorted({seed for runs in task["runs"].values() for seed in runs}, key=int)
    what = "accuracy" if task["metric"] == "accuracy" else f"loss, {task['unit']}"
    spread = f"{len(seeds)} seeds" if len(seeds) > 1 else "one seed"
    return (
        f"{task['title']} ({first['parameters']:,} parameters, {settings['steps']:,} steps of "
        f"{settings['batch']}): held-out {what} at the end, mean and range of {spread}, "
        "differences to dense with as many replicas ± their standard error over the seeds, and "
        "whether the mean lies within the range of the dense seeds or how far outside; the loss of "
        f"training over the last {_last_steps(first)} of the steps, and its difference; bytes "
        "that a replica sent in the whole run and in its last step, as a share of dense "
        f"({first['device'].split(' x ')[-1]}, jax {first['jax']})"
    )


def _row(task: Task, name: str) -> Row:
    runs, about = task["runs"][name], task["methods"][name]
    higher, steps = task["higher_is_better"], task["settings"]["steps"]
    scale, digits, _ = _format(task)
    dense = task["runs"].get(f"dense_{about['replicas']}", {})
    values, base, is_dense = finals(task, runs), finals(task, dense), runs is dense
    learnt, learnt_dense = training(runs), training(dense)
    density = statistics.fmean(run["density"] for run in runs.values())
    return (
        about["title"],
        str(about["replicas"]),
        *mean_and_range(task, runs),
        "-" if is_dense else difference(values, base, scale, digits),
        "-" if is_dense else judged(values, base, higher, scale, digits),
        f"{statistics.fmean(learnt.values()):.3f}",
        "-" if is_dense else difference(learnt, learnt_dense, 1, 3),
        sent(runs, lambda run: (run["bytes_sent"], run["bytes_dense"])),
        sent(runs, lambda run: (run["bytes_last"], run["bytes_dense"] / steps)),
        f"{density:.3%}",
    )


def brief(report: Mapping[str, Any]) -> Table:
    """Return a row for each task: dense and two densities of DGC on four replicas."""
    names = "dense_4", "dgc_4", "unmasked_unramped99_4"
    tasks = [t for t in report["tasks"].values() if all(map(t["runs"].get, names))]
    ways = "dense", "DGC 99.9 %", "sent", "DGC 99 %, unmasked, no warm-up", "sent"
    rows = [_brief(task, names) for task in tasks]
    return Table("", ("held-out, mean (range)", *ways), rows)


def _brief(task: Task, names: Sequence[str]) -> Row:
    dense, *others = (task["runs"][name] for name in names)
    cells = ["{} ({})".format(*mean_and_range(task, dense))]
    for runs in others:
        sums = (sum(run[name] for run in runs.values()) for name in BYTES)
        cells += ["{} ({})".format(*mean_and_range(task, runs)), _share(*sums)]
    unit = task["metric"] if task["metric"] == "accuracy" else task["unit"]
    return f"{task['title']}: {unit}", *cells


def mean_and_range(task: Task, runs: Runs) -> tuple[str, str]:
    """Return mean and range of the task's metric over the seeds."""
    scale, digits, sign = _format(task)
    values = finals(task, runs).values()
    if lost := sum(not math.isfinite(value) for value in values):
        return "diverged", f"{lost} of {len(values)}"
    low, high = (f"{scale * end(values):.{digits}f}" for end in (min, max))
    return f"{scale * statistics.fmean(values):.{digits}f}{sign}", f"{low}–{high}"


def _format(task: Task) -> tuple[int, int, str]:
    """Return the metric's factor, decimals and unit."""
    return (100, 2, " %") if task["metric"] == "accuracy" else (1, 3, "")


def finals(task: Task, runs: Runs) -> dict[str, float]:
    """Return the task's metric at the end, by seed."""
    return {seed: run["final"][task["metric"]] for seed, run in runs.items()}


def training(runs: Runs) -> dict[str, float]:
    """Return the mean training loss between the last two evaluations, by seed."""
    return {seed: run["curve"][-1]["train_loss"] for seed, run in runs.items()}


def _last_steps(run: Mapping[str, Any]) -> str:
    before, end = (point["step"] for point in run["curve"][-2:])
    return f"{(end - before) / end:.0%}"


def difference(
    values: Mapping[str, float], dense: Mapping[str, float], scale: float, digits: int
) -> str:
    """Return the mean difference over the seeds that both have, ± its standard error."""
    gaps = [scale * (values[seed] - dense[seed]) for seed in values if seed in dense]
    if not gaps or not all(map(math.isfinite, gaps)):
        return "-"
    error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else 0.0
    more = f" ± {error:.{digits}f}" if len(gaps) > 1 else ""
    return f"{statistics.fmean(gaps):+.{digits}f}{more}"


def sent(runs: Runs, of: Callable[[Any], tuple[float, float]]) -> str:
    """Return bytes sent, and their share of those of a dense exchange."""
    pairs = zip(*map(of, runs.values()), strict=True)
    own, dense = (statistics.fmean(each) for each in pairs)
    return network_text(own) + ("" if own == dense else f", {_share(own, dense)}")


def _share(own: float, dense: float) -> str:
    return f"1/{dense / own:,.0f}"


def judged(
    values: Mapping[str, float],
    dense: Mapping[str, float],
    higher_is_better: bool,
    scale: float = 1.0,
    digits: int = 3,
) -> str:
    """Return where the mean of some seeds lies relative to the range of the dense seeds.

    Args:
        values: Final figures by seed.
        dense: Those of the dense runs with as many replicas.
        higher_is_better: Whether more is better.
        scale: The factor of a distance, for its text.
        digits: Its decimals.

    Returns:
        `within`, or how far outside and on which side.
    """
    if not dense:
        return "-"
    if not all(map(math.isfinite, (*values.values(), *dense.values()))):
        return "diverged" if all(map(math.isfinite, dense.values())) else "dense diverged"
    mean, low, high = statistics.fmean(values.values()), min(dense.values()), max(dense.values())
    # The mean of equal numbers may be rounded.
    if low - 1e-9 <= mean <= high + 1e-9:
        return "within"
    above = mean > high
    word = "better" if above == higher_is_better else "worse"
    away = scale * (mean - high if above else low - mean)
    return f"{away:.{digits}f} {word}"
