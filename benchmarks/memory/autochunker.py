"""Plan a head and its loss within the peaks that PyTorch's AutoChunker reaches.

    python -m benchmarks.memory.autochunker --out benchmarks/results/autochunker.json

The program has AutoChunker's shapes: 32,768 tokens x 768, a head of 128,256 words, their product
in bfloat16, the mean cross-entropy in float32, and the gradient by the head and the tokens.
AutoChunker states 25.75 GB eager, and 5.22, 3.12, 2.08 and 1.55 GB with 4, 8, 16 and 32 chunks,
whose number a person sets. Each of these is the budget of a `jrc.plan`. Bytes are those of the
target's own compiler, FLOPs are counted with loops, seconds are stated and not measured.

Nothing is run. Budgets that `--out` has are not planned again. With `--target=` the program is
compiled for this machine's device; with `--toy` too, and budgets are as large a share of the
baseline's peak.
"""

import argparse
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp

import jrc
from benchmarks._lib import platform
from benchmarks._lib.command import Benchmark, Run
from benchmarks._lib.report import Report
from benchmarks._lib.table import Table
from benchmarks._models.model import array
from benchmarks._private import (
    abstract_on,
    compiled_with_memory,
    flops,
    memory_text,
    program_figures,
    seconds_text,
)

NAME = "memory.autochunker"
EAGER = "eager"
PEAKS = {EAGER: 25.75e9, "4": 5.22e9, "8": 3.12e9, "16": 2.08e9, "32": 1.55e9}
"""What AutoChunker's authors state, in bytes, by the number of its chunks."""
TOKENS, WIDTH, WORDS = 32_768, 768, 128_256
TOY_SIZES = 8192, 32, 4096
ARGNUMS = (0, 1)
MOST_FLOPS = 1.01


def head_loss(w: Any, x: Any, labels: Any) -> Any:
    """Return the mean cross-entropy of labels, in float32, of a product in bfloat16."""
    logits = (x @ w).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def arguments(toy: bool) -> tuple[Any, ...]:
    """Return the shapes of the head, the tokens and the labels."""
    tokens, width, words = TOY_SIZES if toy else (TOKENS, WIDTH, WORDS)
    low = functools.partial(array, dtype=jnp.bfloat16)
    return low(width, words), low(tokens, width), array(tokens, dtype=jnp.int32)


def measure(run: Run) -> None:
    """Compile the baseline, and plan within each peak."""
    run.report |= platform.machine()
    target = jrc.target(run.options.target) if run.options.target else None
    args = arguments(run.options.toy)
    rows = run.report.setdefault("rows", {})
    run.report["target"] = run.options.target
    if "baseline" not in run.report:
        run.status("baseline")
        run.report["baseline"] = figures(args, target)
    base = run.report["baseline"]
    for chunks, peak in PEAKS.items():
        if chunks not in rows:
            run.status(f"{chunks} chunks")
            share = peak / PEAKS[EAGER]
            budget = int(share * base["peak"] if run.options.toy else peak)
            rows[chunks] = planned(args, budget, target)
            run.save()


def figures(args: tuple[Any, ...], target: jrc.Target | None) -> dict[str, Any]:
    """Return peak, FLOPs and stated seconds of the gradient with nothing recomputed."""
    args = abstract_on(target, args) if target else args
    program = jax.value_and_grad(head_loss, ARGNUMS)
    lowered = jax.jit(program).lower(*args)
    memory, compiled = compiled_with_memory(lowered, target.platform if target else None)
    stated = compiled and program_figures(compiled, target)["stated"]
    counted = flops(jax.make_jaxpr(program)(*args))
    return {"peak": memory.peak, "flops": counted, "stated": stated}


def planned(args: tuple[Any, ...], budget: int, target: jrc.Target | None) -> dict[str, Any]:
    """Return what a plan within a budget costs, or the least bytes where there is none."""
    began = time.perf_counter()
    try:
        plan = jrc.plan(head_loss, *args, budget=budget, argnums=ARGNUMS, target=target)
    except jrc.BudgetError as error:
        return {"budget": budget, "least": error.least_bytes}
    cost = plan.verified or plan.predicted
    return {
        "budget": budget,
        "peak": cost.peak_bytes,
        "flops": cost.flops_ratio,
        "stated": cost.seconds,
        "compilations": plan.compilations,
        "chunks": [each.chunks for each in plan.chunks],
        "seconds": time.perf_counter() - began,
    }


def tables(report: Report) -> list[Table]:
    """Return a row for each of AutoChunker's peaks, with the plan that has it as its budget."""
    base = report["baseline"]
    first = (
        "none, the baseline",
        "",
        _bytes(base["peak"], report),
        "1.000",
        _seconds(base),
        "",
        "",
    )
    rows = [first, *(_row(name, row, report) for name, row in report["rows"].items())]
    tokens, width, words = TOY_SIZES if report["toy"] else (TOKENS, WIDTH, WORDS)
    where = f"an absent {report['target']}" if report["target"] else report["device"]
    title = (
        f"Head and loss, {tokens:,} tokens x {width:,} x {words:,}, bfloat16, loss in float32, "
        f"compiled for {where} (jax {report['jax']}): AutoChunker's peaks as budgets of plans"
    )
    heads = (
        "AutoChunker", "its peak, the budget", "plan's peak", "FLOPs, ratio", "seconds stated",
        "chunks", "compilations",
    )  # fmt: skip
    return [Table(title, heads, rows)]


def _row(name: str, row: dict[str, Any], report: Report) -> tuple[str, ...]:
    title = name if name == EAGER else f"{name} chunks"
    if "least" in row:
        least = f"at least {_bytes(row['least'], report)}"
        return title, _bytes(row["budget"], report), least, "", "", "", ""
    return (
        title,
        _bytes(row["budget"], report),
        _bytes(row["peak"], report),
        f"{row['flops']:.4f}",
        _seconds(row),
        ", ".join(map(str, row["chunks"])) or "none",
        str(row["compilations"]),
    )


def _bytes(size: int, report: Report) -> str:
    return memory_text(size) if report["toy"] else f"{size / 1e9:.2f} GB"


def _seconds(row: dict[str, Any]) -> str:
    return seconds_text(row["stated"]) if row["stated"] else "-"


def problems(report: Report) -> list[str]:
    """Return what breaks a promise: no plan within a peak, or more FLOPs than 1.01 times."""
    wrong = []
    for name, row in report["rows"].items():
        if row.get("peak", row["budget"] + 1) > row["budget"]:
            wrong.append(f"{name}: no plan within {row['budget']:,} bytes")
        # Tiny programs have more beside their products.
        elif row["flops"] > MOST_FLOPS and not report["toy"]:
            wrong.append(f"{name}: {row['flops']:.3f} x the FLOPs")
    return wrong


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the target."""
    add = parser.add_argument
    add("--target", default="h100", help="a name of jrc.target, or nothing; default: h100")


BENCHMARK = Benchmark(
    NAME, __doc__, measure, tables, add_options, toy={"target": ""}, keys=("rows", "target"),
    problems=problems, platform="cpu",
)  # fmt: skip
main = BENCHMARK.main

if __name__ == "__main__":
    main()
