"""Compare the peaks that the planner predicts with those that compilers state, per platform.

    python -m benchmarks.targets.prediction --cache runs/prediction \
        --out benchmarks/results/prediction.json
    python -m benchmarks.targets.prediction --targets cpu,v5e --models gpt,mlp

For each model of the planner, at a size that compiles in seconds: the baseline, every block
under `jax.checkpoint`, the leanest plan and one in the middle of the planner's row. The peak of the
gradient program as the model has it, beside that of the target's own compiler.

Nothing is run. Rows that `--out` has are not measured again, and each is written as soon as it is
there; `--again` predicts all rows again. With `--cache` no program is compiled twice. A target
whose compiler is not installed is left out.
"""

import argparse
import functools
import pathlib
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jrc
from benchmarks._lib import platform
from benchmarks._lib.command import Benchmark, Run, names_of
from benchmarks._lib.gradient import Cache
from benchmarks._lib.report import Report
from benchmarks._lib.table import Table, mib
from benchmarks._models.catalogue import MODELS
from benchmarks._models.model import Model
from benchmarks._private import CandidatePeaks

CPU = "cpu"
TARGETS = (CPU, "v5e", "v5p", "h100")
SMALL: Mapping[str, Callable[..., Model]] = {
    "gpt": functools.partial(MODELS["gpt"], layers=3, batch=32),
    "gpt_scanned": functools.partial(MODELS["gpt_scanned"], layers=8, batch=16),
    "lstm": functools.partial(MODELS["lstm"], steps=64, batch=512),
    "resnet": functools.partial(MODELS["resnet"], depth=20, batch=512),
    "linen": functools.partial(MODELS["linen"], layers=2, batch=128),
    "unet": functools.partial(MODELS["unet"], levels=3, batch=64),
    "mlp": functools.partial(MODELS["mlp"], layers=8, batch=16384),
}
"""The planner's models with fewer layers and more data: a TPU keeps small values on its chip."""
_FEWER_LEVELS = {"resnet": {"depth": 8}, "unet": {"levels": 2}}
FEWER_LAYERS: Mapping[str, Mapping[str, Mapping[str, int]]] = {
    "v5e": _FEWER_LEVELS,
    "v5p": {**_FEWER_LEVELS, "gpt": {"layers": 2}, "linen": {"layers": 1}, "mlp": {"layers": 4}},
}
"""What is smaller still on targets whose compiler takes minutes for a model."""


def measure(run: Run) -> None:
    """Measure each model on each target, row by row."""
    run.report |= platform.machine()
    rows = run.report.setdefault("rows", {})
    cache = Cache(run.options.cache, quick=True)
    for name in run.options.targets:
        target = None if name == CPU else jrc.target(name)
        try:
            _ = target and target.devices
        except ImportError as error:
            run.console.print(f"{name} is left out: {error}")
            continue
        for model in run.options.models:
            key = f"{model} {name}"
            if key not in rows or run.options.again:
                run.status(f"{model} on {name}")
                built = SMALL[model](run.options.toy, **FEWER_LAYERS.get(name, {}).get(model, {}))
                found = CandidatePeaks(built, target, cache)
                rows[key] = {"model": model, "target": name, "ways": found.peaks(run.status)}
                run.save()


def error_of(way: Mapping[str, int]) -> float:
    """Return how far a prediction is off, as a share of the compiled peak."""
    return way["predicted"] / way["compiled"] - 1


def tables(report: Report) -> list[Table]:
    """Return the errors of each target, and those of each row."""
    rows = report["rows"].values()
    by_target: dict[str, list[float]] = {}
    for row in rows:
        errors = [error_of(way) for way in row["ways"].values()]
        by_target.setdefault(row["target"], []).extend(errors)
    summary = [
        (name, str(len(errors)), *(f"{100 * x:.1f}" for x in _middle_and_worst(errors)))
        for name, errors in by_target.items()
    ]
    title = "Predicted against compiled peak: error in per cent of the compiled one"
    return [
        Table(title, ("", "programs", "median", "worst"), summary),
        Table(
            "Compiled peak in MiB, and the error of the prediction in per cent",
            ("", "", *_ways(report)),
            [_cells(row, _ways(report)) for row in rows],
        ),
    ]


def _middle_and_worst(errors: list[float]) -> tuple[float, float]:
    sizes = [abs(x) for x in errors]
    return statistics.median(sizes), max(sizes)


def _ways(report: Report) -> list[str]:
    return list(dict.fromkeys(way for row in report["rows"].values() for way in row["ways"]))


def _cells(row: Mapping[str, Any], ways: list[str]) -> tuple[str, ...]:
    found = row["ways"]
    return (
        row["model"],
        row["target"],
        *(_peak(found[way]) if way in found else "" for way in ways),
    )


def _peak(way: Mapping[str, int]) -> str:
    return f"{mib(way['compiled'])} ({100 * error_of(way):+.0f})"


def problems(report: Report) -> Iterator[str]:
    """Yield the programs without a prediction or a compiled peak."""
    for key, row in report["rows"].items():
        for way, found in row["ways"].items():
            if min(found["predicted"], found["compiled"]) <= 0:
                yield f"{key}: {way}: predicted {found['predicted']}, compiled {found['compiled']}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the models and the targets."""
    add = parser.add_argument
    add("--models", type=names_of(SMALL), default=list(SMALL), help="default: all")
    add("--targets", type=names_of(TARGETS), default=list(TARGETS), help="default: all")
    add("--again", action="store_true", help="predict rows that --out has once more")
    add("--cache", type=pathlib.Path, help="folder for what compilers state of programs")


BENCHMARK = Benchmark(
    "targets.prediction", __doc__, measure, tables, add_options,
    toy={"models": ["mlp"]}, keys=("rows",), problems=problems, platform="cpu",
)  # fmt: skip
main = BENCHMARK.main

if __name__ == "__main__":
    main()
