"""Measure how the learning rate moves held-out loss: dense AdamW, SparseLoCo, DiLoCo alike.

    python -m benchmarks.convergence.rates --rates 0.0015,0.003,0.006 \
        --out benchmarks/results/outer_rates.json

The GPT of `convergence.outer --layers 4 --width 128`, on which methods of few synchronisations end
furthest above dense training: four replicas, one seed, the same schedule with other peaks of the
rate. Each method is compared with dense training at the best rate of both.

`--out` is written after every run, and runs that it has are not repeated.
"""

import argparse
from typing import Any

from benchmarks._lib import platform
from benchmarks._lib.command import Benchmark, Run, names_of
from benchmarks._lib.report import Report
from benchmarks._lib.table import Table
from benchmarks.convergence._outer_methods import METHODS, REPLICAS
from benchmarks.convergence._tasks import SHARED, TASKS
from benchmarks.convergence.outer import SIZES, TOY, train

NAME = "convergence.rates"
WIDE = {"layers": 4, "width": 128}
CHOSEN = ("adamw", "sparseloco_5_d32", "diloco_15_4bit")
SEED = 0


def measure(run: Run) -> None:
    """Do every run that the report lacks."""
    platform.require_devices(REPLICAS, NAME)
    options, runs = run.options, run.report.setdefault("runs", {})
    for rate in options.rates:
        task = TASKS["gpt"](SHARED | SIZES | WIDE | {"rate": rate} | (TOY if options.toy else {}))
        run.report |= {"title": task.title, "unit": task.unit, "steps": task.settings["steps"]}
        for name in options.methods:
            found = runs.setdefault(name, {})
            if str(rate) not in found:
                status = lambda text, what=f"{name}, {rate}": run.status(f"{what}: {text}")  # noqa: E731
                found[str(rate)] = train(METHODS[name], task, REPLICAS, SEED, status)["curve"]
                run.save()


def tables(report: Report) -> list[Table]:
    """Return a table of the loss at the end by method and rate."""
    runs: dict[str, Any] = report["runs"]
    rates = sorted({float(rate) for found in runs.values() for rate in found})
    ends = {
        name: {float(rate): curve[-1]["loss"] for rate, curve in found.items()}
        for name, found in runs.items()
    }
    dense = min(ends.get("adamw", {}).values(), default=float("nan"))
    rows = [
        (
            METHODS[name].title,
            *(f"{found[rate]:.3f}" if rate in found else "" for rate in rates),
            f"{min(found, key=found.__getitem__):g}",
            "-" if name == "adamw" else f"{min(found.values()) / dense - 1:+.1%}",
        )
        for name, found in ends.items()
    ]
    title = (
        f"{report['title']} ({report['steps']:,} steps on {REPLICAS} replicas, one seed): held-out "
        f"loss at the end, {report['unit']}, by the peak of AdamW's rate; and the difference to "
        "dense, each at its best rate"
    )
    return [Table(title, ("", *(f"{rate:g}" for rate in rates), "best", "to dense"), rows)]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add methods and rates."""
    add = parser.add_argument
    add(
        "--methods",
        type=names_of(METHODS),
        default=list(CHOSEN),
        help=f"default: {','.join(CHOSEN)}",
    )
    add("--rates", type=_rates, default=[1.5e-3, 3e-3, 6e-3], help="default: 0.0015,0.003,0.006")


def _rates(text: str) -> list[float]:
    try:
        rates = [float(each) for each in text.split(",")]
    except ValueError:
        rates = [0.0]
    if not all(0 < rate < float("inf") for rate in rates):
        raise argparse.ArgumentTypeError(f"must be positive numbers, 0.001,0.003, got {text!r}.")
    return rates


BENCHMARK = Benchmark(NAME, __doc__, measure, tables, add_options, keys=("runs",))
main = BENCHMARK.main

if __name__ == "__main__":
    main()
