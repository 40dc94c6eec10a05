"""Plan one long sequence for an accelerator that is not there, with and without chunks.

    python -m benchmarks.targets.longest_sequence --out benchmarks/results/longest_sequence.json

A Llama of 1 B parameters and one sequence, of each length: the baseline, every block under
`jax.checkpoint`, `jrc.plan` without chunks and `jrc.plan`. The budget is nine tenths of the
device's memory, less the two float32 moments of AdamW for each parameter. Bytes are those of the
target's own compiler for `value_and_grad` of the loss; a dash means that it needs more than the
budget, or that no plan fits, with the bytes that were reached, or that the compiler failed.

Nothing is run. Compilations take up to minutes: lengths that `--out` has are not measured again.
"""

import argparse
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax

import jrc
from benchmarks._lib import platform
from benchmarks._lib.command import Benchmark, Run
from benchmarks._lib.report import Report
from benchmarks._lib.table import Table
from benchmarks.targets._models import FULL, MODELS
from benchmarks.targets.largest_batch import Case

NAME = "targets.longest_sequence"
LENGTHS = [8_192, 16_384, 32_768, 65_536, 131_072, 262_144, 524_288]
WAYS = ("baseline", "every block", "plan without chunks", "plan")


def measure(run: Run) -> None:
    """Measure each length that is not there yet, way by way."""
    run.report |= platform.machine()
    case = Case(
        MODELS["llama_1b"](run.options.toy), jrc.target(run.options.target), run.options.toy
    )
    run.report |= {"target": case.target.name, "budget": case.budget}
    rows = run.report.setdefault("rows", {})
    for length in run.options.lengths:
        row = rows.setdefault(str(length), {})
        for way in WAYS:
            if way not in row:
                run.status(f"{length:,} tokens: {way}")
                began = time.perf_counter()
                with jax.set_mesh(case.mesh):
                    row[way] = _figures(_ways(case, length)[way])
                row[way]["seconds"] = time.perf_counter() - began
                run.save()


def _figures(way: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a way, or what the compiler failed with."""
    try:
        return way()
    except jax.errors.JaxRuntimeError as error:
        return {"peak": None, "error": str(error).partition("\n")[0]}


def _ways(case: Case, length: int) -> dict[str, Callable[[], dict[str, Any]]]:
    *params, tokens = case.model.args(1, case.mesh)
    shape = jax.ShapeDtypeStruct((1, length + 1), tokens.dtype, sharding=tokens.sharding)
    args = (*params, shape)
    by_hand = functools.partial(case.model.loss, way=FULL)
    return {
        "baseline": lambda: case.compiled(case.model.loss, args),
        "every block": lambda: case.compiled(by_hand, args),
        "plan without chunks": lambda: _planned(case, args, chunks=False),
        "plan": lambda: _planned(case, args, chunks=True),
    }


def _planned(case: Case, args: tuple[Any, ...], chunks: bool) -> dict[str, Any]:
    try:
        plan = jrc.plan(
            case.model.loss, *args, budget=case.budget, target=case.target, chunks=chunks
        )
    except jrc.BudgetError as error:
        return {"peak": error.least_bytes}
    cost = plan.verified or plan.predicted
    return {
        "peak": cost.peak_bytes,
        "flops": cost.flops_ratio,
        "stated": cost.seconds,
        "compilations": plan.compilations,
        "chunks": [{"name": each.name, "chunks": each.chunks} for each in plan.chunks],
    }


def tables(report: Report) -> list[Table]:
    """Return one table: the peak of each way, and FLOPs over those of the baseline."""
    rows = []
    for length, row in report["rows"].items():
        cells = []
        for way in WAYS:
            cost = row.get(way, {})
            peak = cost.get("peak")
            text = f"{peak / 1e9:,.1f} GB" if peak else ""
            if "error" in cost:
                text = "- (not compiled)"
            elif peak and peak > report["budget"]:
                text = f"- ({text})"
            elif "flops" in cost:
                text += f", {cost['flops']:.3f} x"
            cells.append(text)
        rows.append((f"{int(length):,}", *cells))
    title = (
        f"Llama 1B, one sequence, compiled for an absent {report['target']}: peak, and FLOPs over "
        f"those of the baseline; {report['budget'] / 1e9:.1f} GB are there"
    )
    return [Table(title, ("tokens", *WAYS), rows)]


def problems(report: Report) -> list[str]:
    """Return what breaks a promise: a plan that needs more than another way that fits."""
    return [
        f"{length} tokens: {way} fits, and the plan does not"
        for length, row in report["rows"].items()
        for way in WAYS[:-1]
        if (row[way]["peak"] or math.inf) <= report["budget"] < (row["plan"]["peak"] or math.inf)
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the lengths and the target."""
    numbers = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    parser.add_argument("--lengths", type=numbers, default=LENGTHS, help="tokens of the sequence")
    parser.add_argument("--target", default="h100", help="a name of jrc.target; default: h100")


BENCHMARK = Benchmark(
    NAME, __doc__, measure, tables, add_options, problems=problems, keys=("rows",),
    toy={"lengths": [2048], "target": "v5e"}, platform="cpu",
)  # fmt: skip
main = BENCHMARK.main

if __name__ == "__main__":
    main()
