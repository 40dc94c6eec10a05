"""Train a GPT in a quarter of the memory that its gradient needs.

    python examples/fit_budget.py
    python examples/fit_budget.py --budget 64MiB
    python examples/fit_budget.py --plot memory.png   # live bytes without a plan and with it

`jrc.explain` reports what the gradient needs, `jrc.plan` chooses what to save and what to recompute
so that it fits, and `jrc.make_train_step(..., memory_budget=...)` does the same for a whole train
step with its optimizer. The losses are those of the step without a budget.
"""

import argparse
import functools
import pathlib
import sys

import common
import jax
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import jrc
from jrc.models import gpt


def mib(size):
    return f"{size / 2**20:,.1f} MiB"


def batches_of(steps, size, length):
    """Return bytes of real text, int32 (steps, size, length + 1): argparse's own source."""
    text = np.frombuffer(pathlib.Path(argparse.__file__).read_bytes(), np.uint8).astype(np.int32)
    starts = np.random.default_rng(0).integers(0, len(text) - length, (steps, size))
    return text[starts[..., None] + np.arange(length + 1)]


def train(step, tx, params, batches, mesh):
    state, losses = jrc.init_state(params, tx, jax.random.key(1), mesh=mesh), []
    peak = step.memory(state, batches[0]).peak
    for batch in batches:
        state, info = step(state, batch)
        losses.append(float(info.loss))
    return peak, losses


def main(argv=None):
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("--budget", help="such as 64MiB (none: a quarter of what the plain gradient needs)")
    add("--steps", type=int, default=5, help="steps of training")
    add("--layers", type=int, default=12, help="blocks of the model")
    add("--length", type=int, default=128, help="length of a sequence")
    add("--plot", type=pathlib.Path, help="picture of the live bytes")
    options = parser.parse_args(argv)
    console = Console()

    # The blocks are one loop, which compiles quickly; the planner looks inside.
    size = {"layers": options.layers, "length": options.length, "width": 64}
    config = gpt.Config(**size, scan=True)
    loss = functools.partial(gpt.loss, config=config)  # loss(params, batch, key)
    params, key = gpt.init(jax.random.key(0), config), jax.random.key(2)
    batches = batches_of(options.steps, 8, options.length)

    # What does it need? Nothing is run, and shapes are enough for the arguments.
    report = jrc.explain(loss, params, batches[0], key)
    budget = options.budget or f"{report.memory.peak // 4 // 1024}KiB"
    console.print(f"The gradient needs {mib(report.memory.peak)}, of which the largest parts are:")
    for line, saved in list(report.by_line.items())[:3]:
        console.print(f"  {mib(saved)} saved at {line}")

    # The cheapest recomputation that fits, and the gradient with it.
    plan = jrc.plan(loss, params, batches[0], key, budget=budget)
    console.print(f"\nThe plan for {budget}:\n{plan}\n", soft_wrap=True)
    lean = plan.apply(loss)  # the same function, for jax.grad, jax.jit, a train step, ...
    if options.plot:
        planned = jrc.explain(lean, params, batches[0], key)
        report.plot(options.plot, planned, names=("baseline", f"plan for {budget}"))
    grads = jax.jit(jax.grad(lean))(params, batches[0], key)
    console.print(f"The norm of the gradient is {optax.tree.norm(grads):.4f}.")

    # A whole train step: optimizer state and update are part of the budget.
    tx, mesh = optax.adam(1e-2), jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    step = jrc.make_train_step(loss, tx, mesh=mesh)
    planned_step = jrc.make_train_step(loss, tx, mesh=mesh, memory_budget=budget)
    peak, losses = train(step, tx, params, batches, mesh)
    planned_peak, planned_losses = train(planned_step, tx, params, batches, mesh)

    table = Table("", "no budget", f"in {budget}", "FLOPs", title="peak, and losses of the steps")
    ratios = [f"x {p.verified.flops_ratio:.3f}" for p in (plan, planned_step.plan)]
    table.add_row("gradient", mib(report.memory.peak), mib(plan.verified.peak_bytes), ratios[0])
    table.add_row("train step", mib(peak), mib(planned_peak), ratios[1])
    for i, (one, two) in enumerate(zip(losses, planned_losses, strict=True)):
        table.add_row(f"loss, step {i}", f"{one:.6f}", f"{two:.6f}")
    console.print(table)

    try:
        jrc.plan(loss, params, batches[0], key, budget="100kB")
    except jrc.BudgetError as error:
        console.print(f"No plan fits 100kB: the least is {mib(error.least_bytes)}")
        least = error.least_bytes

    peaks = (report.memory.peak, plan.verified.peak_bytes), (peak, planned_peak)
    return {"plan": plan, "peaks": peaks, "losses": (losses, planned_losses), "least": least}


if __name__ == "__main__":
    try:
        main()
    except jrc.BudgetError as error:  # names the least peak and what needs it
        sys.exit(str(error))
