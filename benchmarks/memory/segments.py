"""Measure what each way of cutting costs: saved bytes, peak and FLOPs of three nets.

    python -m benchmarks.memory.segments --out benchmarks/results/segments.json

- Sixteen blocks of dense, gelu, dense, tanh (512 wide, batch 2048; one activation is 4 MiB; gelu is
  recomputed on its own), cut at every block, every 2, 4, 8 and once, beside Paddle's figures.
- ResNet-50 on CIFAR images, batch 64, with MindSpore's setting.
- GPT, 24 layers, unrolled and scanned.

Nothing is run: peaks are XLA's for the compiled `value_and_grad`, saved bytes are the residuals of
the derivative besides its arguments, FLOPs and products are counted in the program.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import jrc
from benchmarks._lib.command import Benchmark, Run
from benchmarks._lib.gradient import saved_bytes
from benchmarks._lib.report import Report
from benchmarks._lib.table import Table, mib
from benchmarks._private import PRODUCTS, primitive_name, walk
from jrc.models import gpt, resnet

SIXTEEN = "sixteen blocks, blocks a segment"
# Bytes saved by the forward pass and peak, MiB, of Paddle on CPU for the same sixteen blocks.
PADDLE = {"0": (192, 197), "1": (60, 85), "2": (28, 65), "4": (12, 73), "8": (4, 113),
          "16": (0, 205)}  # fmt: skip


def measure(run: Run) -> None:
    """Compile the three nets with each way of cutting."""
    run.report |= run.about() | {"paddle": PADDLE, "nets": {}}
    nets = {
        SIXTEEN: sixteen,
        "ResNet-50, CIFAR, batch 64": residual,
        "GPT, 24 layers, 256 wide, 256 x 4": transformer,
    }
    for name, net in nets.items():
        run.status(name)
        run.report["nets"][name] = net(run.options.toy)


def measured(fn: Callable[..., Any], args: Any, has_aux: bool = False) -> dict[str, int]:
    """Return bytes, FLOPs and products of the gradient program of `fn`, a function of `args`."""
    report = jrc.explain(fn, *args, has_aux=has_aux)
    program = jax.make_jaxpr(jax.value_and_grad(fn, has_aux=has_aux))(*args)
    return {
        "held": saved_bytes(fn, args, has_aux),
        "temporaries": report.memory.temporaries,
        "peak": report.memory.peak,
        "flops": report.flops,
        "products": sum(n for eqn, n in walk(program) if primitive_name(eqn) in PRODUCTS),
    }


def sixteen(toy: bool) -> dict[str, Any]:
    """Return the figures of sixteen blocks by the number of blocks in a segment."""
    blocks, batch, width = 16, *((64, 16) if toy else (2048, 512))
    square = jax.ShapeDtypeStruct((width, width), jnp.float32)
    params = [{"a": square, "b": square} for _ in range(blocks)]
    x = jax.ShapeDtypeStruct((batch, width), jnp.float32)

    def loss(params: Any, x: Any) -> jax.Array:
        for i, block in enumerate(params):
            h = jrc.recompute_op(jax.nn.gelu)(x @ block["a"])
            x = jrc.mark(jnp.tanh(h @ block["b"]), f"block_{i}")
        return jnp.mean(x)

    found = {}
    for size in map(int, PADDLE):
        ends = range(size - 1, blocks, size) if size else ()
        lean = jrc.recompute_segments(loss, [f"block_{i}" for i in ends])
        found[str(size)] = measured(lean, (params, x))
    return found


def residual(toy: bool) -> dict[str, Any]:
    """Return the figures of a ResNet-50 in three ways of cutting."""
    config = resnet.Config(
        depth=14 if toy else 50, classes=10, stem="cifar", width=4 if toy else None
    )
    params, state = jax.eval_shape(functools.partial(resnet.init, config=config), jax.random.key(0))
    size, batch = (8, 2) if toy else (32, 64)
    images = jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    loss = functools.partial(resnet.loss, config=config)
    programs = {
        "baseline": loss,
        "all but the first block of each stage": jrc.recompute_segments(
            loss, **config.mindspore_segments
        ),
        "every block": jrc.recompute_segments(loss, config.boundaries),
    }
    args = (params, state, (images, labels))
    return {name: measured(fn, args, has_aux=True) for name, fn in programs.items()}


def transformer(toy: bool) -> dict[str, Any]:
    """Return the figures of a GPT, unrolled and scanned, each in three ways of cutting."""
    sizes = {"heads": 2, "width": 16, "length": 16} if toy else {"heads": 8, "width": 256}
    found = {}
    for scan in (False, True):
        config = gpt.Config(layers=3 if toy else 24, scan=scan, **sizes)
        params = jax.eval_shape(functools.partial(gpt.init, config=config), jax.random.key(0))
        batch = jax.ShapeDtypeStruct((4, config.length + 1), jnp.int32)
        programs = _scanned(config) if scan else _unrolled(config)
        found |= {name: measured(fn, (params, batch)) for name, fn in programs.items()}
    return found


def _unrolled(config: gpt.Config) -> dict[str, Callable[..., Any]]:
    loss = functools.partial(gpt.loss, config=config)
    return {
        "unrolled, baseline": loss,
        "unrolled, every block": jrc.recompute_segments(loss, config.boundaries),
        "unrolled, every 4": jrc.recompute_segments(loss, config.boundaries[3::4]),
    }


def _scanned(config: gpt.Config) -> dict[str, Callable[..., Any]]:
    loss = functools.partial(gpt.loss, config=config)
    each = functools.partial(jrc.recompute_scan, segments=config.layers)
    return {
        "scanned, baseline": loss,
        "scanned, every block": functools.partial(loss, loop=each),
        "scanned, sqrt": functools.partial(loss, loop=jrc.recompute_scan),
    }


def tables(report: Report) -> list[Table]:
    """Return the sixteen blocks beside Paddle, then the whole nets."""
    return [_beside_paddle(report), _nets(report)]


def _beside_paddle(report: Report) -> Table:
    blocks = report["nets"][SIXTEEN]
    words = {"0": "none", "1": "each", "16": "all in one"}
    rows = [
        (
            words.get(size, f"every {size}"),
            mib(row["held"]),
            mib(row["temporaries"]),
            *map(str, report["paddle"][size]),
            str(row["products"] - blocks["0"]["products"]),
        )
        for size, row in blocks.items()
    ]
    title = (
        "Sixteen blocks of dense, gelu, dense, tanh (512 wide, batch 2048; gelu re-run on its "
        "own), MiB saved by the forward pass and at the peak beside Paddle's on CPU, and "
        "products run again (Paddle: 32)"
    )
    heads = ("blocks a segment", "saved", "peak", "Paddle saved", "Paddle peak", "re-run")
    return Table(title, heads, rows)


def _nets(report: Report) -> Table:
    nets: Mapping[str, Any] = {k: v for k, v in report["nets"].items() if k != SIXTEEN}
    rows = []
    for net, programs in nets.items():
        base = next(iter(programs.values()))
        for name, row in programs.items():
            sizes = (mib(row[key]) for key in ("held", "temporaries", "peak"))
            rows.append((f"{net}: {name}", *sizes, f"{row['flops'] / base['flops']:.3f}"))
    title = (
        f"Whole nets ({report['device']}, jax {report['jax']}; MiB, `value_and_grad` compiled; "
        "peak with arguments and results)"
    )
    return Table(title, ("", "saved", "temporaries", "peak", "FLOPs, ratio"), rows)


BENCHMARK = Benchmark("memory.segments", __doc__, measure, tables)
main = BENCHMARK.main

if __name__ == "__main__":
    main()
