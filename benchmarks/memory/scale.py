"""Measure what fits one device, and how fast a GPT of GPT-2's size is at equal memory.

    python -m benchmarks.memory.scale --platform gpu --dtype bfloat16 --only sizes,speed
    python -m benchmarks.memory.scale --platform cpu --memory 16GiB

- `sizes`: the largest batch at the model's length, and the longest sequence of one row, whose
  gradient fits the device's memory with nothing recomputed and with a plan. On an accelerator the
  largest are then run, and so is the first that does not fit without a plan.
- `speed`: tokens per second of the gradient by each way that users write by hand (full remat,
  JAX's and MaxText's policies), and by the plan whose budget is that way's peak. The two and the
  program with nothing recomputed, where it fits, take turns; medians and quartiles of the rounds.

Bytes are XLA's for the compiled gradient; FLOPs are counted in the program, loops times their
length. Without `--memory` the memory is nine tenths of what the device's allocator has. A CPU does
not report it: there `--memory` must be given, and sizes are compiled, not run. Parameters, and so
gradients, are float32; the model computes in `--dtype`.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks._lib.command import Benchmark, Run, at_least, names_of
from benchmarks._lib.report import Report
from benchmarks._lib.table import Table
from benchmarks._lib.timing import quartiles, ratios
from benchmarks._private import checked_budget, memory_text
from benchmarks.memory._scale_measure import Model, sizes, speed
from benchmarks.memory._scale_policies import PLAIN, POLICIES
from jrc.models import gpt

SECTIONS = ("sizes", "speed")
GPT2 = gpt.Config(50257, layers=12, heads=12, width=768, length=1024, scan=True)
TOY_SIZE = gpt.Config(256, layers=2, heads=2, width=32, length=64, scan=True)
TOY = {"rounds": 2, "warm_up": 1, "batch": 2, "policies": ["save_qkv_proj"]}
TOY_MEMORY = 3_000_000


def measure(run: Run) -> None:
    """Measure the sections."""
    options = run.options
    model = Model(TOY_SIZE if options.toy else GPT2, options.dtype)
    memory = options.memory or (TOY_MEMORY if options.toy else memory_of_device())
    execute = options.toy or jax.default_backend() != "cpu"
    laps = (options.warm_up, options.rounds)
    run.report["model"] = f"GPT {model.config.layers} x {model.config.width}"
    dtype = {"dtype": options.dtype}
    run.sections(
        {
            "sizes": lambda: dtype | sizes(model, memory, execute, run.status),
            "speed": lambda: (
                dtype | speed(model, memory, options.batch, options.policies, laps, run.status)
            ),
        }
    )


def memory_of_device() -> int:
    """Return nine tenths of what the device's allocator has, bytes."""
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        sys.exit("memory.scale: this device does not report its memory. Give it: --memory 16GiB.")
    return int(0.9 * stats["bytes_limit"])


def tables(report: Report) -> list[Table]:
    """Return a table for each section that the report has."""
    make = {"sizes": sizes_table, "speed": speed_table}
    return [make[name](report["model"], report[name]) for name in SECTIONS if name in report]


def sizes_table(model: str, found: dict[str, Any]) -> Table:
    """Return what fits."""

    def row(what: str, at: dict[str, Any]) -> tuple[str, ...]:
        ratio = f"{at['planned'] / at['plain']:.2f} x" if at["plain"] else "-"
        flops = f"{at['flops']:.3f}" if "flops" in at else "-"
        ran = ", ".join(
            f"{name}: {'ran' if done else 'out of memory'}"
            for name, done in at.get("ran", {}).items()
            if done is not None
        )
        return what, f"{at['plain']:,}", f"{at['planned']:,}", ratio, flops, ran or "compiled only"

    heads = ("", "baseline", "with a plan", "ratio", "FLOPs", "run")
    names = {"batch": "largest batch", "sequence": "longest sequence"}
    rows = [row(title, found[name]) for name, title in names.items()]
    title = f"{_where(model, found)}: gradients that fit {memory_text(found['memory'])}"
    return Table(title, heads, rows)


def speed_table(model: str, found: dict[str, Any]) -> Table:
    """Return tokens per second; a ratio is the median of those of the rounds."""
    tokens = found["batch"] * found["length"]

    def cell(seconds: Sequence[float] | None) -> str:
        if not seconds:
            return "-"
        low, middle, high = (tokens / s for s in quartiles(seconds)[::-1])
        return f"{middle:,.0f} ({low:,.0f}–{high:,.0f})"

    def over(seconds: dict[str, list[float]], name: str, base: str) -> str:
        if name not in seconds or base not in seconds:
            return "-"
        return f"{statistics.median(ratios(seconds[base], seconds[name])):.3f}"

    def row(name: str, at: dict[str, Any]) -> tuple[str, ...]:
        seconds, plan = at.get("seconds", {}), at.get("plan")
        return (
            name,
            memory_text(at["peak"]) + ("" if seconds else ", not run"),
            f"{at['flops']:.3f}",
            cell(seconds.get("theirs")),
            f"{plan['flops']:.3f}" if plan else "-",
            cell(seconds.get("plan")),
            over(seconds, "plan", "theirs"),
            over(seconds, "plan", "plain"),
        )

    heads = (
        "", "peak", "FLOPs", "tokens/s", "plan's FLOPs", "plan's tokens/s", "plan to it",
        "plan to the baseline",
    )  # fmt: skip
    title = (
        f"{_where(model, found)}, {found['batch']} x {found['length']} tokens: medians and "
        f"quartiles of {found['laps'][1]} rounds; the plan's budget is the peak beside it"
    )
    return Table(title, heads, [row(name, at) for name, at in found["rows"].items()])


def _where(model: str, found: dict[str, Any]) -> str:
    return f"{model}, {found['dtype']} ({found['device']}, jax {found['jax']})"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the sections and their settings."""
    add = parser.add_argument
    ways = [name for name in POLICIES if name != PLAIN]
    add("--only", type=names_of(SECTIONS), default=list(SECTIONS), help="sections (default: all)")
    add("--policies", type=names_of(POLICIES), default=ways, help="of the speed (default: all)")
    add("--memory", type=_bytes, help="bytes, or as 16GiB (default: what the device reports)")
    add("--batch", type=at_least(1), default=8, help="sequences, for the speed")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--rounds", type=at_least(2), default=20, help="rounds that count")
    add("--warm-up", type=at_least(1), default=3, help="rounds before them")


def _bytes(text: str) -> int:
    try:
        return int(checked_budget(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


BENCHMARK = Benchmark(
    "memory.scale", __doc__, measure, tables, add_options, toy=TOY, keys=("toy", "model")
)
main = BENCHMARK.main

if __name__ == "__main__":
    main()
