"""What each way of cutting costs: bytes held, peak and operations of three nets, side by side.

    python benchmarks/segments.py [--toy] [--out benchmarks/results/segments.json]

- Sixteen blocks of dense, gelu, dense, tanh (512 wide, batch 2048; one activation is 4 MiB; gelu is
  a re-run operator), cut at every block, every 2, 4, 8 and once, beside what Paddle holds.
- ResNet-50 on CIFAR images, batch 64, with MindSpore's setting.
- GPT, 24 layers, unrolled and scanned.

Nothing is run: bytes are XLA's for the compiled `value_and_grad`, held bytes are what the
derivative keeps besides its arguments, FLOPs and products are counted in the program.
"""

import argparse
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import jrc
from benchmarks._lib import platform as machine
from jrc._jaxpr import flops, mark_of, primitive_name, walk
from jrc.models import gpt, resnet

MIB = 2**20
# Bytes held after the forward pass and peak, MiB, of Paddle on CPU for the same sixteen blocks.
PADDLE = {0: (192, 197), 1: (60, 85), 2: (28, 65), 4: (12, 73), 8: (4, 113), 16: (0, 205)}
PRODUCTS = ("dot_general", "conv_general_dilated")
# What only names, rounds or reshapes a value keeps the same bytes; 1 - y² of a kept tanh, which JAX
# lists beside it, XLA makes anew where it is read.
ALIASES = ("reduce_precision", "optimization_barrier", "reshape", "squeeze", "one_minus_square")


def held_bytes(fn, args):
    """What the derivative keeps: each buffer once, without what it was given."""
    jaxpr = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(fn, *args)[1]))(*args)
    source = {}
    for eqn in jaxpr.eqns:
        if mark_of(eqn) is not None or primitive_name(eqn) in ALIASES:
            for given, made in zip(eqn.invars, eqn.outvars, strict=False):
                source[made] = source.get(given, given) if hasattr(given, "aval") else given
    kept = {source.get(v, v) for v in jaxpr.outvars if not hasattr(v, "val")}
    given = {*jaxpr.invars, *jaxpr.constvars}
    return sum(v.aval.size * v.aval.dtype.itemsize for v in kept if v not in given)


def measure(fn, args, has_aux=False):
    """Bytes, FLOPs and products of the gradient program of `fn`, a function of `args`."""
    program = jax.value_and_grad(fn, has_aux=has_aux)
    memory = jax.jit(program).lower(*args).compile().memory_analysis()
    jaxpr = jax.make_jaxpr(program)(*args)
    scalar = (lambda *args: fn(*args)[0]) if has_aux else fn
    return {
        "held": held_bytes(scalar, args),
        "temporaries": memory.temp_size_in_bytes,
        "peak": memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes,
        "flops": flops(jaxpr),
        "products": sum(n for eqn, n in walk(jaxpr) if primitive_name(eqn) in PRODUCTS),
    }


def sixteen(toy):
    blocks, batch, width = 16, *((64, 16) if toy else (2048, 512))
    square = jax.ShapeDtypeStruct((width, width), jnp.float32)
    params = [{"a": square, "b": square} for _ in range(blocks)]
    x = jax.ShapeDtypeStruct((batch, width), jnp.float32)

    def loss(params, x):
        for i, block in enumerate(params):
            h = jrc.recompute_op(jax.nn.gelu)(x @ block["a"])
            x = jrc.mark(jnp.tanh(h @ block["b"]), f"block_{i}")
        return jnp.mean(x)

    found = {}
    for size in PADDLE:
        ends = range(size - 1, blocks, size) if size else ()
        lean = jrc.recompute_segments(loss, [f"block_{i}" for i in ends])
        found[str(size)] = measure(lean, (params, x))
    return found


def residual(toy):
    config = resnet.Config(
        depth=14 if toy else 50, classes=10, stem="cifar", width=4 if toy else None
    )
    params, state = jax.eval_shape(functools.partial(resnet.init, config=config), jax.random.key(0))
    size, batch = (8, 2) if toy else (32, 64)
    images = jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    loss = functools.partial(resnet.loss, config=config)
    programs = {
        "nothing re-run": loss,
        "all but the first block of each stage": jrc.recompute_segments(
            loss, **config.mindspore_segments
        ),
        "every block": jrc.recompute_segments(loss, config.boundaries),
    }
    args = (params, state, (images, labels))
    return {name: measure(fn, args, has_aux=True) for name, fn in programs.items()}


def transformer(toy):
    layers = 3 if toy else 24
    sizes = {"heads": 2, "width": 16, "length": 16} if toy else {"heads": 8, "width": 256}
    found = {}
    for scan in (False, True):
        config = gpt.Config(layers=layers, scan=scan, **sizes)
        params = jax.eval_shape(functools.partial(gpt.init, config=config), jax.random.key(0))
        batch = jax.ShapeDtypeStruct((4, config.length + 1), jnp.int32)
        loss = functools.partial(gpt.loss, config=config)
        if scan:
            each = functools.partial(jrc.recompute_scan, segments=layers)
            programs = {
                "scanned, nothing re-run": loss,
                "scanned, every block": functools.partial(loss, loop=each),
                "scanned, sqrt": functools.partial(loss, loop=jrc.recompute_scan),
            }
        else:
            programs = {
                "unrolled, nothing re-run": loss,
                "unrolled, every block": jrc.recompute_segments(loss, config.boundaries),
                "unrolled, every 4": jrc.recompute_segments(loss, config.boundaries[3::4]),
            }
        found |= {name: measure(fn, (params, batch)) for name, fn in programs.items()}
    return found


def show(report):
    console = Console()
    for title, rows in report["nets"].items():
        heads = ("", "held, MiB", "temporaries, MiB", "peak, MiB", "FLOPs", "products")
        table = Table(*heads, title=title)
        base = next(iter(rows.values()))
        for name, row in rows.items():
            sizes = (f"{row[k] / MIB:,.1f}" for k in ("held", "temporaries", "peak"))
            ratio = f"{row['flops'] / base['flops']:.3f} x"
            table.add_row(name, *sizes, ratio, str(row["products"]))
        console.print(table)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="tiny nets, to see that it runs")
    machine.add_platform(parser)
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args(argv)
    machine.use(options.platform)
    nets = {
        "sixteen blocks, blocks a segment": sixteen(options.toy),
        "ResNet-50, CIFAR, batch 64": residual(options.toy),
        "GPT, 24 layers, 256 wide, 256 x 4": transformer(options.toy),
    }
    report = machine.device() | {"paddle": PADDLE, "nets": nets}
    show(report)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return report


if __name__ == "__main__":
    main()
