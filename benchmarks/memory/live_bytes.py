"""The README's picture of memory: a GPT's gradient with nothing re-run and within a budget.

    python benchmarks/memory.py [--toy] [--platform cpu] [--out benchmarks/results/memory.png]

The program is compiled and not run; the curves are the live bytes along XLA's schedule.
"""

import argparse
import functools
import pathlib

import jax
import jax.numpy as jnp

import jrc
from benchmarks._lib import platform as machine
from jrc.models import gpt

SIZES = {"layers": 12, "width": 256, "length": 256, "heads": 8}
TOY = {"layers": 2, "width": 64, "length": 32, "heads": 2}
BATCH = 8
BUDGET = 0.25


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--toy", action="store_true", help="tiny, to see that it runs")
    machine.add_platform(parser)
    add("--out", type=pathlib.Path, default=pathlib.Path("benchmarks/results/memory.png"))
    options = parser.parse_args(argv)
    machine.use(options.platform)
    config = gpt.Config(**(TOY if options.toy else SIZES))
    params = jax.eval_shape(functools.partial(gpt.init, config=config), jax.random.key(0))
    batch = jax.ShapeDtypeStruct((BATCH, config.length + 1), jnp.int32)
    loss = functools.partial(gpt.loss, config=config)
    plan = jrc.plan(loss, params, batch, budget=BUDGET)
    plain, planned = jrc.explain(loss, params, batch), jrc.explain(plan.apply(loss), params, batch)
    cost = f"jrc.plan: {100 * ((plan.verified or plan.predicted).flops_ratio - 1):.1f} % more FLOPs"
    plain.plot(options.out, planned, names=("nothing re-run", cost))
    print(f"{options.out}: {plan}")


if __name__ == "__main__":
    main()
