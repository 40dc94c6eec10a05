"""Measure seconds of gradients: plans by time, by FLOPs, ways by hand, nothing recomputed.

    python -m benchmarks.memory.seconds --models scanned_gpt,mirrored_mlp --out seconds.json

For each program of the zoo and each budget, a fraction as for `jrc.plan`: the plan of the least
seconds and that of the fewest FLOPs. All programs of a model run in turns, in one process, and the
medians are compared. The regret of a plan is its seconds over the least of all programs that were
measured and need no more bytes than its budget, ways by hand and the baseline among them.

The last column is Spearman's rank correlation of the seconds that were stated for the compiled
programs of a model with the measured ones.

A minute or two a program. Nothing else should run on the machine.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import jrc
from benchmarks._lib import platform
from benchmarks._lib.command import Benchmark, Run, names_of
from benchmarks._lib.report import Report
from benchmarks._lib.table import Table
from benchmarks._private import in_turns, memory_of, program_figures
from benchmarks.memory.zoo import ways
from tests.zoo.catalogue import NAMES, make, missing
from tests.zoo.program import Program, gradient

NAME = "memory.seconds"
BUDGETS = (1.0, 0.5, 0.25)
AIMS = ("time", "flops")


def measure(run: Run) -> None:
    """Measure each model that was asked for."""
    run.report |= platform.machine()
    models = run.report.setdefault("models", {})
    for name in run.options.models:
        if missing(name) or (run.options.resume and "programs" in models.get(name, {})):
            continue
        run.status(f"{name}: planning")
        try:
            budgets = BUDGETS[1:2] if run.options.toy else BUDGETS
            models[name] = one(make(name, run.options.toy), run.options.rounds, budgets)
        except Exception as error:  # noqa: BLE001
            models[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        run.save()
        jax.clear_caches()


def one(program: Program, rounds: int, budgets: Sequence[float] = BUDGETS) -> dict[str, Any]:
    """Return seconds, bytes, and for plans the budget and the seconds that they state."""
    found: dict[str, dict[str, Any]] = {name: {} for name in ways(program)}
    losses: dict[str, Callable[..., Any]] = dict(ways(program))
    for aim in AIMS:
        for budget in budgets:
            options = {"argnums": program.argnums, "has_aux": program.has_aux, "minimize": aim}
            plan = jrc.plan(program.loss, *program.args, budget=budget, **options)
            name = f"plan, {aim}, {budget}"
            losses[name] = plan.apply(program.loss)
            found[name] = {"budget": plan.budget, "compilations": plan.compilations}
    calls = {}
    for name, loss in losses.items():
        run, arrays = gradient(program, loss)
        compiled = jax.jit(run).lower(*arrays).compile()
        found[name] |= {"peak": memory_of(compiled).peak} | program_figures(compiled)
        calls[name] = lambda compiled=compiled, arrays=arrays: compiled(*arrays)
    for name, seconds in in_turns(calls, rounds).items():
        found[name]["seconds"] = statistics.median(seconds)
    return {"programs": found}


def tables(report: Report) -> list[Table]:
    """Return a table of all programs, and one of the regrets of plans."""
    models = {
        name: each["programs"] for name, each in report["models"].items() if "programs" in each
    }
    if not models:
        return []
    rows = [
        (
            model,
            name,
            f"{each['seconds'] / programs['nothing']['seconds']:.3f} x",
            f"{each['stated'] / programs['nothing']['stated']:.3f} x",
            f"{each['peak'] / 2**20:,.1f} MiB",
        )
        for model, programs in models.items()
        for name, each in programs.items()
    ]
    heads = ("", "program", "measured", "stated", "peak")
    return [Table("Seconds over those with nothing recomputed", heads, rows), _regrets(models)]


def _regrets(models: Mapping[str, Any]) -> Table:
    rows = []
    for aim in AIMS:
        for budget in BUDGETS:
            name = f"plan, {aim}, {budget}"
            found = [regret(each, name) for each in models.values() if name in each]
            if found:
                rows.append((name, f"{statistics.median(found):.3f}", f"{max(found):.3f}"))
    ranks = [rank_correlation(programs) for programs in models.values()]
    rows.append(("rank of stated seconds", f"{statistics.median(ranks):.3f}", f"{min(ranks):.3f}"))
    title = f"Regret in seconds over {len(models)} programs; rank correlation, median and worst"
    return Table(title, ("", "median", "worst"), rows)


def regret(programs: Mapping[str, Any], name: str) -> float:
    """Return the seconds of a plan over the least of all programs within its budget."""
    budget = programs[name]["budget"]
    fitting = [each["seconds"] for each in programs.values() if each["peak"] <= budget]
    return programs[name]["seconds"] / min([*fitting, programs[name]["seconds"]])


def rank_correlation(programs: Mapping[str, Any]) -> float:
    """Return Spearman's correlation of stated and measured seconds."""
    stated, measured = (
        np.argsort(np.argsort([each[key] for each in programs.values()]))
        for key in ("stated", "seconds")
    )
    return float(np.corrcoef(stated, measured)[0, 1])


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the models."""
    add = parser.add_argument
    add("--models", type=names_of(NAMES), default=list(NAMES), help="default: all")
    add("--rounds", type=int, default=5, help="rounds that count; default: 5")
    add("--resume", action="store_true", help="leave programs alone that --out has")


BENCHMARK = Benchmark(
    NAME, __doc__, measure, tables, add_options, toy={"rounds": 1}, keys=("toy", "models"),
)  # fmt: skip
main = BENCHMARK.main

if __name__ == "__main__":
    main()
