"""Measure plans of programs from packages of others, beside the recomputation of their authors.

    python -m benchmarks.memory.others --out benchmarks/results/others.json
    python -m benchmarks.memory.others --out benchmarks/results/others.json --resume
    python -m benchmarks.memory.others --models distrax_flow,flaxdiff_unet --toy
    python -m benchmarks.memory.others --target h100 --out benchmarks/results/others_h100.json

The programs are those of `benchmarks/memory/_others`: losses made of the code of packages, which
the extras `others`, `others-maxtext` and `others-keras` install. For each: the loss as it is, each
block (or step) under `jax.checkpoint`, `dots_saveable` over the whole loss and over each block, and
what the authors offer, where they offer anything; then plans at fractions between the least peak
and that of the baseline, and for the peak of each block and of the authors' own recomputation as a
budget in bytes. Each has its peak, FLOPs, and seconds as jrc states them; a plan its seconds of
planning, the number of compilations and the largest difference of its gradients from the plain
ones.

A row is written when it is measured. With `--resume` rows that are there are not measured again. A
program whose package is not installed is left out. The exit status is 1 if a plan fails, needs more
than 1 % more than a way by hand within its budget, or has other gradients.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

import jrc
from benchmarks._lib import platform
from benchmarks._lib.command import Benchmark, Run
from benchmarks._lib.gradient import Cache
from benchmarks._lib.report import Report
from benchmarks.memory import _others_tables
from benchmarks.memory._others.catalogue import NAMES, make, missing
from benchmarks.memory._plan_options import add_plan_options
from benchmarks.memory._zoo_tables import beating
from benchmarks.memory.zoo import (
    AIMS,
    Compiler,
    attempted,
    gradients,
    plan_figures,
    planned,
    ways,
)
from tests.zoo.program import Program

NAME = "memory.others"
BUDGETS, TOY_BUDGETS = (0.5, 0.25, 0.0), (0.5, 0.0)
LEFT_OUT = ("all under one", "unbatched dots", "unbatched dots of each block")


def measure(run: Run) -> None:
    """Measure each program that was asked for."""
    run.report |= platform.machine()
    target = jrc.target(run.options.target) if run.options.target else None
    models = run.report.setdefault("models", {})
    if models and run.report.get("target", "") != run.options.target:
        sys.exit(f"{NAME}: {run.options.out} has another target. Write to another file.")
    run.report["target"] = run.options.target
    compiler = Compiler(Cache(run.options.cache, quick=True), target)
    if run.options.cache:
        folder = run.options.cache / "xla"
        jax.config.update("jax_compilation_cache_dir", str(folder.resolve()))
    for name in run.options.models:
        if package := missing(name):
            run.console.print(f"{name}: left out, {package} is not installed")
            continue
        run.status(f"{name}: making it")
        found = models[name] = models.get(name, {}) if run.options.resume else {}
        one(name, make(name, run.options.toy), found, compiler, run)
        # Modules keep what was compiled for them.
        jax.clear_caches()


def one(name: str, program: Program, found: dict[str, Any], compiler: Compiler, run: Run) -> None:
    """Add to `found` all figures of one program that it does not have."""
    by_hand, plans = found.setdefault("by_hand", {}), found.setdefault("plans", {})
    found["tolerance"] = program.tolerance
    for way, fn in ways(program).items():
        if way not in by_hand and way not in LEFT_OUT:
            run.status(f"{name}: {way}")
            by_hand[way] = attempted(lambda fn=fn: compiler.figures(program, fn))
            run.save()

    @functools.cache
    def plain() -> Any:
        return gradients(program, program.loss)

    budgets = dict(_budgets(by_hand, run.options.toy))
    for aim in run.options.minimize:
        asked = {key: budget for key, budget in budgets.items() if f"{aim}, {key}" not in plans}
        run.status(f"{name}: plans, {aim}")
        rows = planned(program, list(asked.values()), aim, compiler.target) if asked else []
        for key, row in zip(asked, rows, strict=True):
            run.status(f"{name}: {key}, {aim}")
            plans[f"{aim}, {key}"] = checked(program, row, plain, compiler)
            run.save()


def checked(
    program: Program, row: dict[str, Any], plain: Callable[[], Any], compiler: Compiler
) -> dict[str, Any]:
    """Return the figures of a plan, with the number of its regions in chunks."""
    chunks = len(row["plan"].chunks) if "plan" in row else 0
    return plan_figures(program, row, plain, compiler) | {"chunks": chunks}


def _budgets(by_hand: dict[str, Any], toy: bool) -> Iterator[tuple[str, int | float]]:
    """Yield what plans are asked for: fractions, and what ways by hand reach, in bytes."""
    for fraction in TOY_BUDGETS if toy else BUDGETS:
        yield str(fraction), fraction
    most = by_hand["nothing"].get("peak", 0)
    for way, row in by_hand.items():
        if way == "each block" or way.startswith("authors"):
            if row.get("peak", most) < most:
                yield way, row["peak"]


def problems(report: Report) -> Iterator[str]:
    """Yield what is broken, of all programs in the report."""
    for name, found in report["models"].items():
        # Bytes of tiny programs are not dominated by large values.
        beaten = {} if report["toy"] else beating(found, _others_tables.SLACK)
        for key, row in found["plans"].items():
            if "error" in row:
                yield f"{name}: {key}: {row['error']}"
                continue
            allowed = max(found["tolerance"], 2 * row.get("gradients_differ_by_hand", 0))
            if row.get("gradients_differ", 0) > allowed:
                yield f"{name}: {key}: gradients differ by {row['gradients_differ']:.1e}"
            if beaten.get(key):
                yield f"{name}: {key} is beaten by: {', '.join(beaten[key])}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the programs."""
    add_plan_options(parser, NAMES, AIMS)


BENCHMARK = Benchmark(
    NAME, __doc__, measure, _others_tables.tables, add_options, keys=("toy", "models"),
    problems=problems,
)  # fmt: skip
main = BENCHMARK.main

if __name__ == "__main__":
    main()
