"""Held-out loss against modelled wall-clock, from the recorded curves of `convergence.outer`.

A replica computes for `STEP_TIME` in each step and waits for its exchanges, as
`jrc.communication_advice` models both: bytes over bandwidth, no latency. The bytes are those that
the run recorded. The computation of compressions and rounds is left out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks._lib.table import Table
from benchmarks._private import bytes_per_second, overlap_of, seconds_text, waiting_seconds
from benchmarks.convergence._outer_methods import METHODS

LINKS = ("1Gbit/s", "100Mbit/s")
STEP_TIME = 0.01
"""Seconds: at 100 Mbit/s dense gradients of the 137,216 parameters then take 6.6 of these steps."""
NEAR = 0.02
"""Share of dense's loss at its end that counts as reached."""


def seconds_at(method: str, run: Mapping[str, Any], link: str) -> np.ndarray:
    """Return the modelled seconds at each point of a run's curve; exchanges have equal bytes."""
    outer = METHODS[method].outer
    hidden = STEP_TIME * overlap_of(outer) if outer is not None else 0.0
    bandwidth = bytes_per_second(link, "link")
    found = []
    for point in run["curve"]:
        count = point["rounds"]
        exchanges = [point["bytes"] / count] * count if count else []
        waited = waiting_seconds(exchanges, bandwidth, hidden=hidden)
        found.append(point["step"] * STEP_TIME + waited)
    return np.asarray(found)


def mean_losses(runs: Mapping[str, Any], seeds: Sequence[str]) -> np.ndarray:
    """Return the held-out loss at each point of the curve, mean of these seeds."""
    losses = [[point["loss"] for point in runs[seed]["curve"]] for seed in seeds]
    return np.mean(losses, 0)


def clock_table(replicas: int, methods: Mapping[str, Any], report: Mapping[str, Any]) -> Table:
    """Return how long each method trains, and until it is near dense's end, on each link."""
    rows = [_row(name, runs, methods.get("adamw", {})) for name, runs in methods.items()]
    title = (
        f"{report['title']}, {replicas} replicas: modelled time of the run and share of it that is "
        "computation, and time until the held-out loss is within "
        f"{NEAR:.0%} of dense's end (same seeds), for {seconds_text(STEP_TIME)} of computation a "
        "step and the recorded bytes; no latency, no overlap but `overlap=1`"
    )
    heads = ["", "held-out"]
    for link in LINKS:
        heads += [f"{link}: run", "computing", f"within {NEAR:.0%}"]
    return Table(title, tuple(heads), rows)


def _row(name: str, runs: Mapping[str, Any], dense: Mapping[str, Any]) -> tuple[str, ...]:
    first = next(iter(runs.values()))
    computing = first["curve"][-1]["step"] * STEP_TIME
    cells = []
    for link in LINKS:
        seconds = seconds_at(name, first, link)
        near = _reached(name, runs, dense, seconds)
        cells += [seconds_text(seconds[-1]), f"{computing / seconds[-1]:.1%}", near]
    return METHODS[name].title, f"{mean_losses(runs, sorted(runs))[-1]:.3f}", *cells


def _reached(
    name: str, runs: Mapping[str, Any], dense: Mapping[str, Any], seconds: np.ndarray
) -> str:
    """Return when the mean loss is first near dense's end, between points by a straight line."""
    seeds = sorted(runs.keys() & dense.keys())
    if not seeds:
        return "-"
    aim = (1 + NEAR) * mean_losses(dense, seeds)[-1]
    found = _first_below(aim, mean_losses(runs, seeds), seconds)
    return "-" if found is None else seconds_text(found)


def _first_below(aim: float, losses: np.ndarray, seconds: np.ndarray) -> float | None:
    """Return when a loss is first at most that, between points by a straight line."""
    below = np.flatnonzero(losses <= aim)
    if not len(below):
        return None
    at = below[0]
    if at == 0:
        return float(seconds[0])
    share = (losses[at - 1] - aim) / (losses[at - 1] - losses[at])
    return float(seconds[at - 1] + share * (seconds[at] - seconds[at - 1]))


def time_to_loss_table(methods: Mapping[str, Any], report: Mapping[str, Any]) -> Table:
    """Return when dense training is where each method ends, over the time that this one takes."""
    dense = methods["adamw"]
    others = {name: runs for name, runs in methods.items() if name != "adamw"}
    rows = [_to_loss(name, runs, dense) for name, runs in others.items() if runs.keys() & dense]
    title = (
        f"{report['title']}: modelled time of a run, and that in which dense AdamW reaches the "
        "held-out loss at its end (same seeds), with the computation and the bytes of the table "
        "above"
    )
    heads = ["", "held-out"]
    for link in LINKS:
        heads += [f"{link}: run", "dense to there", "ratio"]
    return Table(title, tuple(heads), rows)


def _to_loss(name: str, runs: Mapping[str, Any], dense: Mapping[str, Any]) -> tuple[str, ...]:
    seeds = sorted(runs.keys() & dense.keys())
    end = mean_losses(runs, seeds)[-1]
    cells = []
    for link in LINKS:
        own = seconds_at(name, runs[seeds[0]], link)[-1]
        of_dense = seconds_at("adamw", dense[seeds[0]], link)
        there = _first_below(end, mean_losses(dense, seeds), of_dense)
        texts = ("-", "-") if there is None else (seconds_text(there), f"{there / own:.1f} x")
        cells += [seconds_text(own), *texts]
    return METHODS[name].title, f"{end:.3f}", *cells
