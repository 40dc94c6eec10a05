"""Measure how long planning takes, against the size of the program.

    python -m benchmarks.memory.planning --out benchmarks/results/planning.json

GPTs of more and more unrolled layers, 64 wide, so that all of their programs are small but for the
number of equations. Each is planned once, by predictions alone (`verify=False`): what a compiler
takes for such programs is its own affair. Seconds are those of the processor, not of the clock:
tracing and planning run in one thread. Beside them stands what JAX takes to trace the gradient.

Sizes that `--out` has are not measured again.
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jrc
from benchmarks._lib.command import Benchmark, Run, at_least
from benchmarks._lib.report import Report
from benchmarks._lib.table import Table
from benchmarks._private import memory_text
from jrc.models import gpt

LAYERS = (12, 48, 192, 1200)
TOY = {"layers": [1, 2]}
BUDGET = 0.5


def measure(run: Run) -> None:
    """Plan a GPT of each number of layers."""
    run.report |= run.about()
    rows = run.report.setdefault("rows", {})
    for layers in run.options.layers:
        if str(layers) not in rows:
            run.status(f"{layers} layers")
            rows[str(layers)] = planned(layers)
            run.save()


def planned(layers: int) -> dict[str, Any]:
    """Return the size of a program, and the seconds to trace its gradient and to plan it."""
    config = gpt.Config(256, layers=layers, heads=4, width=64, length=64)
    params = jax.eval_shape(functools.partial(gpt.init, config=config), jax.random.key(0))
    batch = jax.ShapeDtypeStruct((8, config.length + 1), jnp.int32)
    loss = functools.partial(gpt.loss, config=config)
    gradient, traced = timed(lambda: jax.make_jaxpr(jax.grad(loss))(params, batch))
    plan, seconds = timed(lambda: jrc.plan(loss, params, batch, budget=BUDGET, verify=False))
    return {
        "equations": len(jax.make_jaxpr(loss)(params, batch).eqns),
        "gradient_equations": len(gradient.eqns),
        "gradient_seconds": traced,
        "plan_seconds": seconds,
        "peak": plan.predicted.peak_bytes,
        "flops_ratio": plan.predicted.flops_ratio,
    }


def timed(make: Callable[[], Any]) -> tuple[Any, float]:
    """Return what a function returns, and the seconds of this process that it took."""
    began = time.process_time()
    return make(), time.process_time() - began


def tables(report: Report) -> list[Table]:
    """Return a row for each size."""
    rows = [
        (
            f"{row['equations']:,}",
            f"{row['gradient_seconds']:.1f}",
            f"{row['plan_seconds']:.1f}",
            f"{1000 * row['plan_seconds'] / row['equations']:.1f}",
            f"{row['plan_seconds'] / row['gradient_seconds']:.0f}",
            memory_text(row["peak"]),
        )
        for row in report["rows"].values()
    ]
    title = (
        "`jrc.plan(..., budget=0.5, verify=False)` of unrolled GPTs, 64 wide (jax "
        f"{report['jax']}, one core), seconds of the processor"
    )
    heads = (
        "equations of the loss", "tracing the gradient", "planning", "ms an equation",
        "planning over tracing", "predicted peak",
    )  # fmt: skip
    return [Table(title, heads, rows)]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the numbers of layers."""
    parser.add_argument(
        "--layers", type=at_least(1), nargs="+", default=list(LAYERS), help="default: %(default)s"
    )


BENCHMARK = Benchmark(
    "memory.planning", __doc__, measure, tables, add_options, toy=TOY, keys=("toy",)
)
main = BENCHMARK.main

if __name__ == "__main__":
    main()
