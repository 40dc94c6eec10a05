"""Compare `jrc.recompute_segments` with the same cuts wrapped by hand, on an unrolled GPT.

    python -m benchmarks.memory.recompute --out benchmarks/results/recompute.json

Three programs of the same `value_and_grad`: the baseline, every segment wrapped by hand in
`jax.checkpoint`, and `jrc.recompute_segments` at the same boundaries. Bytes are XLA's; FLOPs are
counted in the program, loops times their length. The gradients of the last two are bit-equal, or
the exit status is 1.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

import jrc
from benchmarks._lib.command import Benchmark, Run, at_least
from benchmarks._lib.gradient import largest_error
from benchmarks._lib.report import Report
from benchmarks._lib.table import Table
from benchmarks._private import cross_entropy, memory_text
from jrc.models import gpt

SIZES = {"layers": 8, "width": 256, "heads": 8, "length": 256, "batch": 4}
TOY = {"layers": 2, "width": 32, "length": 32, "batch": 2, "repeats": 1}
PLAIN, BY_HAND, SEGMENTS = "baseline", "jax.checkpoint by hand", "recompute_segments"


def by_hand(params: Any, batch: Any, config: gpt.Config) -> jax.Array:
    """Return the GPT's loss, cut by hand as `recompute_segments` cuts at the blocks' marks.

    A segment reaches from the boundary before it to its own, so the first one has the embedding
    too. Without that XLA would fuse other operators, and rounding would differ.
    """

    def first(params: Any, tokens: Any) -> jax.Array:
        return block(params["block_0"], gpt.embed(params, tokens, config))

    block = functools.partial(gpt.block, config=config, key=None)
    x = jax.checkpoint(first)(params, batch[:, :-1])
    for name in config.boundaries[1:]:
        x = jax.checkpoint(block)(params[name], x)
    return cross_entropy(gpt.unembed(params, x), batch[:, 1:])


def measure(run: Run) -> None:
    """Compile and run the three programs."""
    options = run.options
    run.report |= run.about()
    model = f"GPT {options.layers} x {options.width}, {options.length} x {options.batch}"
    config = gpt.Config(
        layers=options.layers, heads=options.heads, width=options.width, length=options.length
    )
    params = gpt.init(jax.random.key(0), config)
    shape = options.batch, options.length + 1
    batch = jax.random.randint(jax.random.key(1), shape, 0, config.vocabulary)
    loss = functools.partial(gpt.loss, config=config)
    programs = {
        PLAIN: loss,
        BY_HAND: functools.partial(by_hand, config=config),
        SEGMENTS: jrc.recompute_segments(loss, config.boundaries),
    }
    rows, results = {}, {}
    for name, fn in programs.items():
        run.status(name)
        rows[name], results[name] = measured(fn, (params, batch), options.repeats)
    run.report |= {
        "model": model,
        "programs": rows,
        "bit_equal_to_hand": largest_error(results[SEGMENTS], results[BY_HAND]) == 0.0,
        "error_to_plain": largest_error(results[SEGMENTS], results[PLAIN]),
    }


def measured(
    fn: Callable[..., Any], args: tuple[Any, ...], repeats: int
) -> tuple[dict[str, Any], Any]:
    """Return bytes, FLOPs and compile time of a gradient program, and what it computes."""
    report, seconds = jrc.explain(fn, *args), []
    program = jax.value_and_grad(fn)
    for _ in range(repeats):
        jax.clear_caches()
        began = time.perf_counter()
        compiled = jax.jit(program).lower(*args).compile()
        seconds.append(time.perf_counter() - began)
    row = {
        "temporaries": report.memory.temporaries,
        "outputs": report.memory.outputs,
        "flops": report.flops,
        "compile_seconds": statistics.median(seconds),
        "compile_spread": max(seconds) - min(seconds),
    }
    return row, compiled(*args)


def tables(report: Report) -> list[Table]:
    """Return the table of the three programs."""
    base = report["programs"][PLAIN]
    rows = [
        (
            name,
            memory_text(row["temporaries"]),
            f"{row['flops'] / base['flops']:.3f}",
            f"{row['compile_seconds'] / base['compile_seconds']:.2f}",
        )
        for name, row in report["programs"].items()
    ]
    equal = "gradients bit-equal to the hand-wrapped ones"
    title = (
        f"`value_and_grad` of an unrolled {report['model']} ({report['device']}, jax "
        f"{report['jax']}){', ' + equal if report['bit_equal_to_hand'] else ''}"
    )
    heads = ("", "temporaries", "FLOPs, ratio", "trace and compile, ratio")
    return [Table(title, heads, rows)]


def problems(report: Report) -> Iterator[str]:
    """Yield where gradients are not those of the same cuts by hand."""
    if not report["bit_equal_to_hand"]:
        yield "the gradients are not bit-equal to those of the same cuts by hand"
    if report["error_to_plain"] > 1e-6:
        yield f"the gradients differ from the plain ones by {report['error_to_plain']:.1e}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the model's sizes and the number of compilations."""
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=at_least(1), default=default)
    parser.add_argument("--repeats", type=at_least(1), default=5, help="compilations of each")


BENCHMARK = Benchmark(
    "memory.recompute", __doc__, measure, tables, add_options, toy=TOY, problems=problems
)
main = BENCHMARK.main

if __name__ == "__main__":
    main()
