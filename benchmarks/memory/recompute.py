"""Recomputation measured: temporaries, compile time and FLOPs of an unrolled GPT, side by side.

    python benchmarks/recompute.py [--layers 8] [--out benchmarks/results/recompute.json]

Three programs of the same `value_and_grad`: nothing re-run, every block wrapped by hand in
`jax.checkpoint`, and `jrc.recompute_segments` at the same boundaries. Bytes are XLA's; FLOPs are
counted in the program, loops times their length.
"""

import argparse
import functools
import json
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import jrc
from benchmarks._lib import platform as machine
from jrc._jaxpr import flops
from jrc.models import gpt
from jrc.models._layers import cross_entropy


def by_hand(params, batch, config):
    """The GPT's loss with its blocks in `jax.checkpoint`, as a user writes it without jrc."""
    block = jax.checkpoint(functools.partial(gpt.block, config=config, key=None))
    x = gpt.embed(params, batch[:, :-1], config)
    for name in config.boundaries:
        x = block(params[name], x)
    return cross_entropy(gpt.unembed(params, x), batch[:, 1:])


def measure(program, args, repeats):
    """Bytes and FLOPs of one program, and the median time of tracing and compiling it."""
    seconds = []
    for _ in range(repeats):
        jax.clear_caches()
        began = time.perf_counter()
        compiled = jax.jit(program).lower(*args).compile()
        seconds.append(time.perf_counter() - began)
    memory = compiled.memory_analysis()
    return compiled(*args), {
        "temporaries": memory.temp_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "flops": flops(jax.make_jaxpr(program)(*args)),
        "compile_seconds": statistics.median(seconds),
        "compile_spread": max(seconds) - min(seconds),
    }


def largest_error(a, b):
    errors = jax.tree.map(lambda x, y: jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y)), a, b)
    return float(jnp.max(jnp.stack(jax.tree.leaves(errors))))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    for name, default in {"layers": 8, "width": 256, "heads": 8, "length": 256, "batch": 4}.items():
        add(f"--{name}", type=int, default=default)
    add("--repeats", type=int, default=5)
    machine.add_platform(parser)
    add("--out", type=pathlib.Path)
    options = parser.parse_args(argv)
    machine.use(options.platform)

    config = gpt.Config(
        layers=options.layers, heads=options.heads, width=options.width, length=options.length
    )
    params = gpt.init(jax.random.key(0), config)
    batch = jax.random.randint(
        jax.random.key(1), (options.batch, options.length + 1), 0, config.vocabulary
    )
    plain = functools.partial(gpt.loss, config=config)
    programs = {
        "nothing re-run": plain,
        "jax.checkpoint by hand": functools.partial(by_hand, config=config),
        "recompute_segments": jrc.recompute_segments(plain, config.boundaries),
    }
    results, found = {}, {}
    for name, program in programs.items():
        found[name], results[name] = measure(
            jax.value_and_grad(program), (params, batch), options.repeats
        )
    ours, hand, none = (found[n] for n in reversed(programs))
    report = {
        **machine.device(),
        "model": f"GPT {options.layers} x {options.width}, {options.length} x {options.batch}",
        "programs": results,
        "bit_equal_to_hand": largest_error(ours, hand) == 0.0,
        "error_to_plain": largest_error(ours, none),
    }
    show(report)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return report


def show(report):
    table = Table("", "temporaries, MiB", "FLOPs", "compile, s", title=report["model"])
    base = report["programs"]["nothing re-run"]
    for name, row in report["programs"].items():
        table.add_row(
            name,
            f"{row['temporaries'] / 2**20:,.1f}",
            f"{row['flops'] / base['flops']:.3f} x",
            f"{row['compile_seconds']:.2f} ± {row['compile_spread'] / 2:.2f}",
        )
    console = Console()
    console.print(table)
    console.print(
        f"bit-equal to the hand-wrapped gradients: {report['bit_equal_to_hand']}; largest error "
        f"to the plain ones, relative to a leaf's largest entry: {report['error_to_plain']:.1e}"
    )


if __name__ == "__main__":
    main()
