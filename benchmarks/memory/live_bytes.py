"""Draw the live bytes of a GPT's gradient, with nothing recomputed and within a budget.

    python -m benchmarks.memory.live_bytes --plot benchmarks/results

The programs are compiled and not run; the curves follow XLA's schedule. The plan has no chunks, of
which a curve would show little but a loop. The picture is the one at the top of the README,
`memory.png`.
"""

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

import jrc
from benchmarks._lib.command import Benchmark, Run
from benchmarks._lib.report import Report
from benchmarks._lib.table import Table
from benchmarks._private import memory_text
from jrc.models import gpt

SIZES = {"layers": 12, "width": 256, "length": 256, "heads": 8}
TOY = {"layers": 2, "width": 64, "length": 32, "heads": 2}
BATCH = 8
BUDGET = 0.25


def measure(run: Run) -> None:
    """Explain the gradient without a plan and with one."""
    run.report |= run.about()
    config = gpt.Config(**(TOY if run.options.toy else SIZES))
    params = jax.eval_shape(functools.partial(gpt.init, config=config), jax.random.key(0))
    args = params, jax.ShapeDtypeStruct((BATCH, config.length + 1), jnp.int32)
    loss = functools.partial(gpt.loss, config=config)
    run.status("planning")
    plan = jrc.plan(loss, *args, budget=BUDGET, minimize="flops", chunks=False)
    run.status("compiling")
    plain, planned = jrc.explain(loss, *args), jrc.explain(plan.apply(loss), *args)
    run.report["programs"] = {"baseline": _row(plain), "jrc.plan": _row(planned)}


def _row(report: jrc.Report) -> dict[str, Any]:
    return {"peak": report.memory.peak, "flops": report.flops, "explain": report.to_json()}


def tables(report: Report) -> list[Table]:
    """Return the peaks of both programs."""
    base = report["programs"]["baseline"]
    rows = [
        (name, memory_text(row["peak"]), f"{row['flops'] / base['flops']:.3f}")
        for name, row in report["programs"].items()
    ]
    return [Table("The gradient of a GPT", ("", "peak", "FLOPs, ratio"), rows)]


def plot(report: Report, folder: pathlib.Path) -> pathlib.Path:
    """Write `memory.png`."""
    plain, planned = (jrc.Report.from_json(row["explain"]) for row in report["programs"].values())
    more = 100 * (planned.flops / plain.flops - 1)
    path = folder / "memory.png"
    plain.plot(path, planned, names=("baseline", f"jrc.plan: {more:.1f} % more FLOPs"))
    return path


BENCHMARK = Benchmark("memory.live_bytes", __doc__, measure, tables, plot=plot)
main = BENCHMARK.main

if __name__ == "__main__":
    main()
