"""Find the largest batch of a GPT on accelerators that are not there, with and without a plan.

    python -m benchmarks.targets.largest_batch --targets v5e,h100 --models small \
        --out benchmarks/results/targets.json

For each model and target: nothing recomputed, every block under `jax.checkpoint`, JAX's
`dots_with_no_batch_dims_saveable`, and `jrc.plan`. Bytes are those of the target's own compiler for
`value_and_grad` of the loss on one device; the budget is nine tenths of its memory, less the two
float32 moments of AdamW for each parameter. Parameters are float32, the loss computes in bfloat16.

Nothing is run. Compilations take up to minutes: rows that `--out` has are not measured again, and
each is written as soon as it is there. A target whose compiler is not installed is left out.
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
from benchmarks._lib.command import Benchmark, Run, names_of
from benchmarks._lib.report import Report
from benchmarks._lib.table import Table
from benchmarks._private import (
    abstract_on,
    flops,
    largest_within,
    memory_needed,
    memory_text,
)
from benchmarks.memory._scale_measure import Model
from benchmarks.memory._scale_policies import FULL, PLAIN
from jrc.models import gpt

NAME = "targets.largest_batch"
DOTS, PLAN = "dots_with_no_batch_dims_saveable", "jrc.plan"
BY_HAND = {PLAIN: "nothing recomputed", FULL: "every block", DOTS: DOTS}
MOMENT_BYTES = 8
MOST = 2**14
SIZES = {
    "tiny": {"layers": 2, "heads": 2, "width": 128, "length": 128, "vocabulary": 512},
    "small": {"layers": 12, "heads": 12, "width": 768, "length": 1024, "vocabulary": 50304},
    "xl": {"layers": 48, "heads": 25, "width": 1600, "length": 1024, "vocabulary": 50304},
}
"""GPTs: GPT-2 of 124 M and 1.5 B parameters, and a tiny one."""


def measure(run: Run) -> None:
    """Measure each model on each target, row by row."""
    run.report |= platform.machine()
    rows = run.report.setdefault("rows", {})
    for target_name in run.options.targets:
        target = jrc.target(target_name)
        try:
            _ = target.devices
        except ImportError as error:
            run.console.print(f"{target_name} is left out: {error}")
            continue
        for name in run.options.models:
            found = rows.setdefault(f"{name} {target.name}", {"model": name, "target": target.name})
            for way in (*BY_HAND, PLAN):
                if way not in found:
                    run.status(f"{name} on {target.name}: {way}")
                    found[way] = _row(name, target, way, run.options.toy)
                    run.save()


def _row(name: str, target: Any, way: str, toy: bool) -> dict[str, Any]:
    """Return the largest batch of one way, its peak and FLOPs, and the seconds that it took."""
    model = Model(gpt.Config(**SIZES[name], scan=True), "bfloat16")
    length = model.config.length
    params, _ = model.args(1, length)
    weights = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    budget = 40 * 2**20 if toy else target.budget - MOMENT_BYTES * weights
    make_args = functools.partial(model.args, length=length)
    began = time.perf_counter()
    found = (_planned if way == PLAN else functools.partial(_by_hand, way=way))(
        model, make_args, target, budget, 8 if toy else MOST
    )
    return found | {"budget": budget, "seconds": time.perf_counter() - began}


def _planned(
    model: Model, make_args: Callable[[int], Any], target: Any, budget: int, most: int
) -> dict[str, Any]:
    found = jrc.largest_batch(make_args, model.loss, budget, target=target, most=most)
    if found.plan is None:
        return {"batch": 0}
    cost = found.plan.verified or found.plan.predicted
    return {"batch": found.recomputed, "peak": cost.peak_bytes, "flops": cost.flops_ratio}


def _by_hand(
    model: Model, make_args: Callable[[int], Any], target: Any, budget: int, most: int, way: str
) -> dict[str, Any]:
    peaks: dict[int, int] = {}
    lossy = functools.partial(model.loss, policy=way)

    def peak(batch: int) -> int:
        args = abstract_on(target, tuple(make_args(batch)), NAME)
        lowered = jax.jit(jax.value_and_grad(lossy)).lower(*args)
        peaks[batch] = memory_needed(lowered, target.platform).peak
        return peaks[batch]

    batch = largest_within(peak, budget, 1, most)
    if not batch:
        return {"batch": 0, "least": peaks[1]}
    count = lambda fn: flops(jax.make_jaxpr(jax.value_and_grad(fn))(*make_args(1)))  # noqa: E731
    return {"batch": batch, "peak": peaks[batch], "flops": count(lossy) / count(model.loss)}


def tables(report: Report) -> list[Table]:
    """Return one row for each model and target."""
    rows = []
    for row in report["rows"].values():
        cells = [row["model"], row["target"]]
        for way in (*BY_HAND, PLAN):
            found = row.get(way)
            cells.append(_cell(found) if found else "")
        budget = next((row[way]["budget"] for way in (*BY_HAND, PLAN) if way in row), 0)
        rows.append((*cells, memory_text(budget)))
    heads = ("model", "", *BY_HAND.values(), PLAN, "budget")
    title = "Largest batch of one device, FLOPs beside those with nothing recomputed"
    return [Table(title, heads, tuple(rows))]


def _cell(found: dict[str, Any]) -> str:
    return f"{found['batch']:,} ({found['flops']:.3f})" if found["batch"] else "0"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the models and the targets."""
    add = parser.add_argument
    add("--models", type=names_of(SIZES), default=["small"], help="default: small")
    add(
        "--targets",
        type=lambda text: text.split(","),
        default=["v5e", "h100"],
        help="names of jrc.target, default: v5e,h100",
    )


BENCHMARK = Benchmark(
    NAME, __doc__, measure, tables, add_options, toy={"models": ["tiny"]}, keys=("rows",),
    platform="cpu",
)  # fmt: skip
main = BENCHMARK.main

if __name__ == "__main__":
    main()
