"""Measure the plans of nine models at twenty budgets each, beside recomputation by hand.

    python -m benchmarks.memory.plan --cache runs/plan --out benchmarks/results/plan.json
    python -m benchmarks.memory.plan --rss --out benchmarks/results/plan.json
    python -m benchmarks.memory.plan --seconds --out benchmarks/results/plan.json

For each model: the baseline, five ways by hand, and plans at twenty budgets between the least
peak and that of the baseline. Each plan's gradient program is compiled here once more, and
XLA's bytes decide. Then a plan at the peak of each way by hand, at half and a quarter of the
temporaries. Plans are those of the fewest FLOPs (`minimize="flops"`), which are exact.

Nothing is run, except with `--toy` (gradients are compared) and `--rss` (the two largest models
run in processes of their own). `--seconds` measures the time of planning again, for an idle
machine. Models that are not asked for stay in `--out` as they were. With `--cache` no program is
compiled twice, in later runs either. The exit status is 1 if a promise is broken: a budget
exceeded, FLOPs that rise with the budget by more than a hundredth, more than five compilations and
two of ways by hand, a refusal whose least peak fits, a way by hand that costs less by 0.0005.
"""

import argparse
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from benchmarks._lib import platform
from benchmarks._lib.command import Benchmark, Run, names_of
from benchmarks._lib.gradient import UNFUSED, Cache, largest_error
from benchmarks._lib.report import Report
from benchmarks._models.catalogue import MODELS
from benchmarks._models.model import Model, drawn
from benchmarks._models.planner import Planner
from benchmarks.memory import _resident
from benchmarks.memory._plan_checks import broken
from benchmarks.memory._plan_tables import tables

BUDGETS, TOY_BUDGETS = 20, 5
PARTS = {"half": 2, "quarter": 4}


def measure(run: Run) -> None:
    """Measure what was asked for: the models, their real memory, or the time of planning."""
    options, report = run.options, run.report
    report |= platform.device()
    models = report.setdefault("models", {})
    if options.cache:
        # For the programs that jrc.plan itself compiles.
        jax.config.update("jax_compilation_cache_dir", str((options.cache / "xla").resolve()))
    if options.rss:
        _resident.study(models, options.toy, run.status)
    if options.seconds:
        for name, found in models.items():
            run.status(f"{found['title']}: planning")
            planner = Planner(MODELS[name](options.toy), Cache(None))
            found["seconds"] = planner.seconds(found["baseline"]["peak"], found["least"])
    for name in () if options.rss or options.seconds else options.models:
        models[name] = one(MODELS[name](options.toy), options, run.status)
        run.save()


def one(model: Model, options: argparse.Namespace, status: Callable[[str], None]) -> dict[str, Any]:
    """Return all figures of one model."""
    planner = Planner(model, Cache(options.cache, options.quick))
    found = {"title": model.title, "scanned": model.scanned, "references": {}}
    status(f"{model.title}: the baseline")
    found["baseline"] = planner.measure(model.fn)
    for name, fn in model.references.items():
        status(f"{model.title}: {name}")
        found["references"][name] = planner.measure(fn)
    if options.references:
        return found
    plans(planner, found, TOY_BUDGETS if options.toy else BUDGETS, status)
    if options.toy:
        budget = (found["least"] + found["baseline"]["peak"]) // 2
        found["gradients_differ"] = gradients_differ(planner, budget)
    return found


def plans(
    planner: Planner, found: dict[str, Any], budgets: int, status: Callable[[str], None]
) -> None:
    """Add everything about plans of a model to its figures by hand."""
    base, title = found["baseline"], found["title"]
    status(f"{title}: the least peak")
    found["least"] = least = planner.plan(0.0).verified.peak_bytes
    span = base["peak"] - least
    found["budgets"] = []
    for i in range(budgets):
        status(f"{title}: budget {i + 1} of {budgets}")
        found["budgets"].append(planner.within(least + span * i // (budgets - 1)))
    found["refused"] = planner.within(int(0.9 * least))
    found["beside"] = {}
    for name, row in found["references"].items():
        status(f"{title}: at the peak of: {name}")
        found["beside"][name] = planner.within(row["peak"])
    fixed = base["peak"] - base["temporaries"]
    for name, parts in PARTS.items():
        found["beside"][name] = planner.within(fixed + base["temporaries"] // parts)
    status(f"{title}: the time of planning")
    found["seconds"] = planner.seconds(base["peak"], least)


def gradients_differ(planner: Planner, budget: int) -> float:
    """Return the largest difference to the plain gradients, relative to a leaf's largest entry."""
    model, args = planner.model, drawn(planner.model.args)
    grads = [
        jax.jit(jax.grad(fn, has_aux=model.has_aux), compiler_options=UNFUSED)(*args)
        for fn in (model.fn, planner.plan(budget).apply(model.fn))
    ]
    plain, lean = (found[0] if model.has_aux else found for found in grads)
    return largest_error(lean, plain)


def problems(report: Report) -> Iterator[str]:
    """Yield the promises that are broken, of all models in the report."""
    for name, found in report["models"].items():
        # Toy models are for gradients: their bytes are not dominated by large values.
        if "budgets" in found and not report["toy"]:
            yield from broken(name, found)
        if found.get("gradients_differ", 0.0) > 1e-6:
            yield f"{name}: gradients differ by {found['gradients_differ']:.1e}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the models, and what to measure of them."""
    add = parser.add_argument
    add("--models", type=names_of(MODELS), default=list(MODELS), help="default: all")
    add("--references", action="store_true", help="only the baseline, and the ways by hand")
    add("--rss", action="store_true", help="real memory of the two largest models in --out")
    add("--seconds", action="store_true", help="the time of planning the models in --out")
    add("--quick", action="store_true", help="no optimised machine code: the bytes are the same")
    add("--cache", type=pathlib.Path, help="folder for what XLA states of programs")


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse `--rss` and `--seconds` without results to add to."""
    options.quick |= options.toy
    if (options.rss or options.seconds) and not (options.out and options.out.exists()):
        parser.error("--rss, --seconds: need the results of a run; name its file with --out")


BENCHMARK = Benchmark(
    "memory.plan", __doc__, measure, tables, add_options, check_options,
    keys=("toy", "models"), problems=problems,
)  # fmt: skip
main = BENCHMARK.main

if __name__ == "__main__":
    main()
