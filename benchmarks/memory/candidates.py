"""Compile every candidate of programs of the zoo, and judge the planner's search by them.

    python -m benchmarks.memory.candidates --models unet,eqx_vit --out candidates.json
    python -m benchmarks.memory.candidates --target h100 --minimize time \
        --out candidates_h100.json --resume
    python -m benchmarks.memory.candidates --judge candidates.json

For each program: cost and peak of each candidate of `jrc.plan`, as they are predicted and as they
are compiled. The tables say how the planner's own search does on them, for budgets at shares of
the range of peaks, with so many compilations: its regret (FLOPs of the program that it chose, or
seconds as jrc states them, over those of the cheapest that fits), how often it refuses a budget
that a candidate fits, and how many programs it compiles. `--judge` compiles nothing.

One or two minutes a program on two cores; with `--resume` programs that are there are left alone.
"""

import argparse
import json
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

import jrc
from benchmarks._lib import platform
from benchmarks._lib.command import Benchmark, Run, names_of
from benchmarks._lib.report import Report
from benchmarks._lib.table import Table
from benchmarks._private import CandidateTable, KnownPeaks, plan_from_table
from tests.zoo.catalogue import NAMES, make, missing

NAME = "memory.candidates"
SHARES = (0.9, 0.75, 0.6, 0.5, 0.4, 0.3, 0.25, 0.15, 0.1, 0.05, 0.02)
FRACTIONS = (0.5, 0.25, 0.0)
COMPILATIONS = (0, 1, 2, 3, 4, 6, 8)


def measure(run: Run) -> None:
    """Compile the candidates of each model that was asked for."""
    if run.options.judge:
        run.report |= _known(run.options.judge)
        return
    run.report |= platform.machine()
    target = jrc.target(run.options.target) if run.options.target else None
    programs = run.report.setdefault("programs", {})
    for option in ("target", "minimize"):
        asked = getattr(run.options, option)
        if programs and run.report.get(option) != asked:
            sys.exit(f"{NAME}: {run.options.out} has another {option}. Write to another file.")
        run.report[option] = asked
    for name in run.options.models:
        if missing(name) or (run.options.resume and "rows" in programs.get(name, {})):
            continue
        run.status(f"{name}: solving")
        program = make(name, run.options.toy)
        began = time.perf_counter()
        try:
            table = CandidateTable(
                program.loss,
                program.args,
                program.argnums,
                program.has_aux,
                target,
                run.options.minimize,
            )
            planning = time.perf_counter() - began
            rows = table.rows(lambda text, name=name: run.status(f"{name}: {text}"))
            programs[name] = table.facts() | {"planning_seconds": planning, "rows": rows}
        except Exception as error:  # noqa: BLE001
            programs[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        run.save()
        # Modules keep what was compiled for them.
        jax.clear_caches()


def _known(path: pathlib.Path) -> Report:
    """Return a report of this benchmark."""
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"{NAME}: --judge must be a report of this benchmark, got {path}: {error}")
    if "minimize" not in report or "programs" not in report:
        sys.exit(f"{NAME}: --judge must be a report of this benchmark's version, got {path}.")
    return report


def tables(report: Report) -> list[Table]:
    """Return how the search does, by compilations; and each program's predictions."""
    programs = {name: each for name, each in report["programs"].items() if "rows" in each}
    if not programs:
        return []
    budgets = [(f"bytes, {most} compilations", SHARES, False, most) for most in COMPILATIONS] + [
        ("fractions, 6 compilations", FRACTIONS, True, 6)
    ]
    rows = []
    for name, shares, is_fraction, most in budgets:
        found = [
            judge(program, share, is_fraction, most)
            for program in programs.values()
            for share in shares
        ]
        regrets = sorted(regret for regret, _ in found if regret is not None)
        compiled = [count for _, count in found]
        rows.append(
            (
                name,
                f"{statistics.fmean(regrets) if regrets else math.nan:.4f}",
                *(f"{quantile(regrets, q):.4f}" for q in (0.5, 0.9, 1.0)),
                f"{len(found) - len(regrets)} of {len(found)}",
                f"{statistics.median(compiled):g}",
                str(max(compiled)),
            )
        )
    heads = ("budgets", "regret, mean", "median", "90 %", "worst", "refused", "compiled", "most")
    title = (
        f"The search on {len(programs)} programs: budgets in bytes at {SHARES} of the range of "
        f"peaks, and fractions {FRACTIONS}"
    )
    return [Table(title, heads, rows), _predictions(programs)]


def judge(
    program: Mapping[str, Any], share: float, is_fraction: bool, compilations: int
) -> tuple[float | None, int]:
    """Return the regret of a program at a share of the range, and compilations.

    The regret of a fraction is that within the bytes that the search made of it; of the fraction 0
    and FLOPs it is the peak over the least there is.
    """
    rows = program["rows"]
    least = min(row["compiled"] for row in rows)
    baseline = next(row["compiled"] for row in rows if row["name"] == "baseline")
    budget: int | float = share if is_fraction else int(least + share * max(baseline - least, 0))
    chosen, limit, compiled = plan_from_table(KnownPeaks(program), budget, compilations)
    if chosen is None or rows[chosen]["compiled"] > limit:
        return None, compiled
    if budget == 0.0 and program["are_costs_exact"]:
        return rows[chosen]["compiled"] / least, compiled
    fitting = [row for row in rows if row["compiled"] <= limit]
    cheapest = min(row["compiled_cost"] for row in fitting if row["compiled_cost"])
    return rows[chosen]["compiled_cost"] / cheapest, compiled


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the entry at a share of a sorted list; NaN of nothing."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


def _predictions(programs: Mapping[str, Any]) -> Table:
    """The errors of predicted peaks, median and worst over the candidates of a program."""
    rows = []
    for name, program in programs.items():
        errors = sorted(abs(row["predicted"] / row["compiled"] - 1) for row in program["rows"])
        texts = (f"{quantile(errors, q):.1%}" for q in (0.5, 1.0))
        count = len(program["rows"])
        rows.append((name, str(count), *texts, f"{program['planning_seconds']:.1f}"))
    heads = ("", "candidates", "error, median", "worst", "seconds")
    return Table("Predicted peaks against compiled ones", heads, rows)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the models."""
    add = parser.add_argument
    add("--models", type=names_of(NAMES), default=list(NAMES), help="default: all")
    add("--target", default="", help="an accelerator that need not be there, such as h100")
    add(
        "--minimize",
        choices=("flops", "time"),
        default="flops",
        help="what plans have the least of (default: %(default)s)",
    )
    add("--resume", action="store_true", help="leave programs alone that --out has")
    add("--judge", type=pathlib.Path, help="a report of this benchmark: compile nothing")


BENCHMARK = Benchmark(
    NAME, __doc__, measure, tables, add_options, keys=("toy", "programs"),
)  # fmt: skip
main = BENCHMARK.main

if __name__ == "__main__":
    main()
