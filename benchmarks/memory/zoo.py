"""Measure plans of programs from packages, beside recomputation by hand.

    python -m benchmarks.memory.zoo --out benchmarks/results/zoo.json
    python -m benchmarks.memory.zoo --out benchmarks/results/zoo.json --resume
    python -m benchmarks.memory.zoo --models eqx_vit,gemma --toy
    python -m benchmarks.memory.zoo --target h100 --budgets 0.5,0.25,0 --minimize time \
        --out benchmarks/results/zoo_h100.json --resume

The programs are those of `tests/zoo`, at full size or tiny. For each: what a person would write
(the baseline, the whole loss under one `jax.checkpoint`, each block, two policies of JAX), and
plans of the least seconds and of the fewest FLOPs at fractions between the least peak and that of
the baseline. Each has its peak, predicted and as compiled here once more, FLOPs, seconds as jrc
states them, kernels of the compiled program and optimization barriers of the lowered one. The
regret of a plan is its cost over the least of all ways that need no more bytes than its budget. The
column "beats" names the ways by hand that have a lower cost within a plan's budget, or a lower
peak than the leanest plan.

Gradients of each plan are compared with the plain ones, and where rounding makes them differ, those
of the ways by hand too. Models that are not asked for stay in `--out` as they were. Each row is
written when it is measured, and with `--resume` rows that are there are not measured again. A
program whose package is not installed is left out. The exit status is 1 if a way by hand beats a
plan, a gradient differs, or a plan fails.

With `--target` all programs are compiled for an accelerator that is not there, and no gradient is
computed.
"""

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

import jrc
from benchmarks._lib import platform
from benchmarks._lib.command import Benchmark, Run, numbers_of
from benchmarks._lib.gradient import UNFUSED, Cache
from benchmarks._lib.report import Report
from benchmarks._lib.table import Table
from benchmarks._private import (
    abstract_on,
    compiled_with_memory,
    flops,
    plan_for_each,
    program_figures,
)
from benchmarks.memory import _zoo_tables
from benchmarks.memory._plan_options import add_plan_options
from tests.zoo.catalogue import NAMES, make, missing
from tests.zoo.program import Program, gradient, gradient_error

NAME = "memory.zoo"
AIMS = ("time", "flops")
BUDGETS, TOY_BUDGETS = (0.75, 0.5, 0.25, 0.05, 0.0), (0.5,)
POLICIES = {
    "dots": jax.checkpoint_policies.dots_saveable,
    "unbatched dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def measure(run: Run) -> None:
    """Measure each model that was asked for."""
    run.report |= platform.machine()
    target = jrc.target(run.options.target) if run.options.target else None
    models = run.report.setdefault("models", {})
    # Reports of an earlier version have no target.
    if models and run.report.get("target", "") != run.options.target:
        sys.exit(f"{NAME}: {run.options.out} has another target. Write to another file.")
    run.report["target"] = run.options.target
    cache = Cache(run.options.cache, quick=True)
    if run.options.cache:
        # For the programs that jrc.plan compiles; its seconds are then those of a later run.
        folder = run.options.cache / "xla"
        jax.config.update("jax_compilation_cache_dir", str(folder.resolve()))
    budgets = run.options.budgets or (TOY_BUDGETS if run.options.toy else BUDGETS)
    for name in run.options.models:
        if package := missing(name):
            run.console.print(f"{name}: left out, {package} is not installed")
            continue
        run.status(f"{name}: making it")
        found = models[name] = models.get(name, {}) if run.options.resume else {}
        one(name, make(name, run.options.toy), found, budgets, Compiler(cache, target), run)
        # Modules keep what was compiled for them.
        jax.clear_caches()


@dataclasses.dataclass(frozen=True)
class Compiler:
    """Compiles gradient programs here, or for a target, and remembers what they need."""

    cache: Cache
    target: jrc.Target | None = None

    def figures(self, program: Program, fn: Callable[..., Any]) -> dict[str, Any]:
        """Return peak, FLOPs, seconds, kernels and barriers of the gradient program of a loss."""
        run, arrays = gradient(program, fn)
        if self.target:
            arrays = abstract_on(self.target, tuple(arrays))
        lowered = jax.jit(run).lower(*arrays)
        counted, text = flops(jax.make_jaxpr(run)(*arrays)), lowered.as_text()
        barriers = text.count("stablehlo.optimization_barrier")
        key = f"{self.target.name} {text}" if self.target else text
        found = self.cache.of(key, lambda: self._compiled(lowered))
        return {"flops": counted, "barriers": barriers} | found

    def _compiled(self, lowered: Any) -> dict[str, Any]:
        began = time.perf_counter()
        platform = self.target.platform if self.target else None
        memory, compiled = compiled_with_memory(lowered, platform)
        seconds = time.perf_counter() - began
        figures = program_figures(compiled, self.target) if compiled else {}
        return {"peak": memory.peak, "compile_seconds": seconds} | figures


def one(
    name: str,
    program: Program,
    found: dict[str, Any],
    budgets: Sequence[float],
    compiler: Compiler,
    run: Run,
) -> None:
    """Add to `found` all figures of one program that it does not have."""
    by_hand, plans = found.setdefault("by_hand", {}), found.setdefault("plans", {})
    found["tolerance"] = program.tolerance
    for way, fn in ways(program).items():
        if way not in by_hand:
            run.status(f"{name}: {way}")
            by_hand[way] = attempted(lambda fn=fn: compiler.figures(program, fn))
            run.save()

    @functools.cache
    def plain() -> Any:
        return gradients(program, program.loss)

    for aim in run.options.minimize:
        asked = [budget for budget in budgets if f"{aim}, {budget}" not in plans]
        run.status(f"{name}: plans, {aim}")
        rows = planned(program, asked, aim, compiler.target) if asked else []
        for budget, row in zip(asked, rows, strict=True):
            run.status(f"{name}: budget {budget}, {aim}")
            plans[f"{aim}, {budget}"] = plan_figures(program, row, plain, compiler)
            run.save()


def plan_figures(
    program: Program, row: dict[str, Any], plain: Callable[[], Any], compiler: Compiler
) -> dict[str, Any]:
    """Return the figures of a plan of `planned`; `plain` returns the gradients of the baseline."""
    if (plan := row.pop("plan", None)) is None:
        return row
    fn = plan.apply(program.loss)
    row |= attempted(lambda: compiler.figures(program, fn))
    if compiler.target or "error" in row:
        return row
    row["gradients_differ"] = gradient_error(gradients(program, fn), plain())
    if row["gradients_differ"] > program.tolerance:
        row["gradients_differ_by_hand"] = worst_by_hand(program, plain())
    return row


def worst_by_hand(program: Program, plain: Any) -> float:
    """Return the largest difference of gradients that a way by hand makes, by rounding alone."""
    by_hand = list(ways(program).values())[1:]
    return max(gradient_error(gradients(program, fn), plain) for fn in by_hand)


def ways(program: Program) -> dict[str, Callable[..., Any]]:
    """Return the loss in each way by hand, by name; the first is the loss as it is."""
    found = {"nothing": program.loss, "all under one": program.under_one({})}
    if program.by_hand:
        found["each block"] = program.build({})
    for name, policy in POLICIES.items():
        found[name] = program.under_one({"policy": policy})
        if program.by_hand:
            found[f"{name} of each block"] = program.build({"policy": policy})
    return found | program.ways


def attempted(measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return figures, or the error: one program that fails does not end the run."""
    try:
        return measured()
    except Exception as error:  # noqa: BLE001
        return {"error": text_of(error)}


def text_of(error: Exception) -> str:
    """Return the start of an error as one line of a report."""
    return f"{type(error).__name__}: {error}"[:500]


def planned(
    program: Program, budgets: Sequence[float], aim: str, target: jrc.Target | None
) -> list[dict[str, Any]]:
    """Return for each fraction the plan and what it says of itself, or the error.

    All are planned together; each gets the mean of the seconds.
    """
    options = {"argnums": program.argnums, "has_aux": program.has_aux, "target": target}
    began = time.perf_counter()
    try:
        plans = plan_for_each(program.loss, *program.args, budgets=budgets, minimize=aim, **options)
    except Exception as error:  # noqa: BLE001
        return [{"error": text_of(error)} for _ in budgets]
    seconds = (time.perf_counter() - began) / len(budgets)
    return [
        {"error": text_of(plan)}
        if isinstance(plan, jrc.BudgetError)
        else {
            "plan": plan,
            "budget": plan.budget,
            "predicted_peak": plan.predicted.peak_bytes,
            "compilations": plan.compilations,
            "seconds": seconds,
        }
        for plan in plans
    ]


def gradients(program: Program, fn: Callable[..., Any]) -> Any:
    """Return the gradients, computed without fusion, so that they round alike."""
    run, arrays = gradient(program, fn)
    return jax.jit(run, compiler_options=UNFUSED)(*arrays)[1]


def tables(report: Report) -> list[Table]:
    """Return one table for each program, and the summary."""
    return _zoo_tables.tables(report)


def problems(report: Report) -> Iterator[str]:
    """Yield what is broken, of all programs in the report."""
    for name, found in report["models"].items():
        for budget, row in found["plans"].items():
            if "error" in row:
                yield f"{name}: {budget}: {row['error']}"
            elif row.get("gradients_differ", 0) > _allowed(row, found["tolerance"]):
                yield f"{name}: {budget}: gradients differ by {row['gradients_differ']:.1e}"
        # Bytes of tiny programs are not dominated by large values.
        for budget, names in _zoo_tables.beating(found).items():
            if names and not report["toy"]:
                yield f"{name}: {budget} is beaten by: {', '.join(names)}"


def _allowed(row: dict[str, Any], tolerance: float) -> float:
    """How far gradients may differ: by the tolerance, or twice what ways by hand do."""
    return max(tolerance, 2 * row.get("gradients_differ_by_hand", 0))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the models and the budgets."""
    add_plan_options(parser, NAMES, AIMS)
    default = ",".join(map(str, BUDGETS))
    parser.add_argument(
        "--budgets",
        type=numbers_of(lambda number: 0 <= number <= 1, "fractions from 0 to 1"),
        help=f"fractions of the range of peaks (default: {default})",
    )


BENCHMARK = Benchmark(
    NAME, __doc__, measure, tables, add_options, keys=("toy", "models"), problems=problems,
)  # fmt: skip
main = BENCHMARK.main

if __name__ == "__main__":
    main()
