"""Measure how the learning rate moves held-out loss: dense AdamW, SparseLoCo, DiLoCo, SNOO alike.

    python -m benchmarks.convergence.rates --rates 0.0015,0.003,0.006 \
        --out benchmarks/results/outer_rates.json
    python -m benchmarks.convergence.rates --layers 2 --width 64 --rates 0.003,0.006,0.012 \
        --methods adamw,sparseloco_15,sparseloco_15_d16,sparseloco_5_d32,diloco_15_4bit,snoo_15 \
        --seeds 3 \
        --out benchmarks/results/outer_rates_2x64.json
    python -m benchmarks.convergence.rates --layers 2 --width 64 --rates 0.003,0.006,0.012 \
        --methods adamw,sparseloco_15,diloco_15_4bit --replicas 8 \
        --out benchmarks/results/outer_rates_8.json

The GPT of `convergence.outer --layers 4 --width 128`, or another: four replicas, or `--replicas`
(of SNOO one), the same schedule with other peaks of the rate. Each method is compared with dense
training at the best rate of both, in loss and in modelled wall-clock. Runs are those of
`convergence.outer` with another rate.

`--out` is written after every run, and runs that it has are not repeated.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks._lib import platform
from benchmarks._lib.command import Benchmark, Run, at_least, names_of, numbers_of
from benchmarks._lib.report import Report
from benchmarks._lib.table import Table
from benchmarks.convergence._outer_clock import clock_table, time_to_loss_table
from benchmarks.convergence._outer_methods import METHODS, REPLICAS
from benchmarks.convergence._tasks import SHARED, TASKS
from benchmarks.convergence.outer import SIZES, TOY, replicas_of, to_dense, train, width

NAME = "convergence.rates"
WIDE = {"layers": 4, "width": 128}
CHOSEN = ("adamw", "sparseloco_5_d32", "diloco_15_4bit")


def measure(run: Run) -> None:
    """Do every run that the report lacks."""
    options, runs = run.options, run.report.setdefault("runs", {})
    platform.require_devices(options.replicas, NAME)
    # Reports of four replicas do not name them.
    if runs and run.report.get("replicas", REPLICAS) != options.replicas:
        sys.exit(f"{NAME}: {options.out} has other replicas. Write to another file.")
    run.report["replicas"] = options.replicas
    size = SHARED | SIZES | WIDE | (TOY if options.toy else {})
    size |= {key: value for key in WIDE if (value := getattr(options, key))}
    for rate in options.rates:
        task = TASKS["gpt"](size | {"rate": rate})
        settings = {key: value for key, value in task.settings.items() if key != "rate"}
        if run.report.setdefault("settings", settings) != settings:
            sys.exit(f"{NAME}: {options.out} has other settings. Write to another file.")
        run.report |= {"title": task.title, "unit": task.unit}
        for seed in range(options.seeds):
            for name in options.methods:
                found = runs.setdefault(name, {}).setdefault(str(rate), {})
                if str(seed) in found:
                    continue
                about = f"{name}, {rate}, seed {seed}"
                status = lambda text, what=about: run.status(f"{what}: {text}")  # noqa: E731
                method = METHODS[name]
                replicas = method.replicas or options.replicas
                found[str(seed)] = train(method, task, replicas, seed, status)
                run.save()


def tables(report: Report) -> list[Table]:
    """Return a table of the loss at the end by method and rate, and two of modelled time."""
    runs: dict[str, Any] = report["runs"]
    replicas = report.get("replicas", REPLICAS)
    rates = sorted({float(rate) for found in runs.values() for rate in found})
    best = {name: found[best_rate(found)] for name, found in runs.items()}
    rows = [
        (
            METHODS[name].title,
            *(_mean_end(found, rate) for rate in rates),
            best_rate(found),
            "-" if name == "adamw" else to_dense(best[name], best.get("adamw", {})),
        )
        for name, found in runs.items()
    ]
    title = (
        f"{report['title']} ({report['settings']['steps']:,} steps on {replicas} replicas): "
        f"held-out loss at the end, {report['unit']}, by the peak of AdamW's rate, mean of the "
        "seeds (how many); the best rate, that of the lowest loss of the first seed; and the "
        "difference to dense with the same seeds, each at its best rate (range of several)"
    )
    heads = ("", *(f"{rate:g}" for rate in rates), "best", "to dense")
    several = {name: seeds for name, seeds in best.items() if METHODS[name].replicas is None}
    found = [Table(title, heads, rows), clock_table(replicas, several, report)]
    if {"adamw"} < several.keys():
        found.append(time_to_loss_table(several, report))
    return found


def best_rate(found: Mapping[str, Any]) -> str:
    """Return the rate at which the first seed of a method ends lowest."""

    def end(rate: str) -> float:
        loss = _end(found[rate]["0"])
        return loss if math.isfinite(loss) else math.inf

    return min(found, key=end)


def _mean_end(found: Mapping[str, Any], rate: float) -> str:
    ends = [
        _end(run) for key, seeds in found.items() if float(key) == rate for run in seeds.values()
    ]
    return f"{statistics.fmean(ends):.3f} ({len(ends)})" if ends else ""


def _end(run: Mapping[str, Any]) -> float:
    return run["curve"][-1]["loss"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add methods, rates, seeds and the size of the model."""
    add = parser.add_argument
    add(
        "--methods",
        type=names_of(METHODS),
        default=list(CHOSEN),
        help=f"default: {','.join(CHOSEN)}",
    )
    positive = numbers_of(lambda number: 0 < number < math.inf, "positive numbers, 0.001,0.003")
    add("--rates", type=positive, default=[1.5e-3, 3e-3, 6e-3], help="default: 0.0015,0.003,0.006")
    add("--seeds", type=at_least(1), default=1, help="runs of each (default: %(default)s)")
    add("--replicas", type=replicas_of, default=REPLICAS, help="2, 4 or 8 (default: %(default)s)")
    add("--layers", type=at_least(1), help="layers of the GPT (default: 4)")
    add("--width", type=width, help="width of the GPT (default: 128)")


BENCHMARK = Benchmark(NAME, __doc__, measure, tables, add_options, keys=("runs",))
main = BENCHMARK.main

if __name__ == "__main__":
    main()
