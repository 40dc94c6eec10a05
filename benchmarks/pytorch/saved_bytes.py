"""PyTorch beside jrc: what each runs again to save as few bytes, on the same GPT, in one run.

    python benchmarks/peers.py [--toy] [--platform cpu] [--plot benchmarks/results]
                               [--out benchmarks/results/peers.json]

Of PyTorch: nothing re-run, `torch.utils.checkpoint` of every block and of every 3, and
`activation_memory_budget` from 1.0 to 0.0 (`peers_torch.py` says how); of jrc: the front of choices
by saved bytes, verified plans, and `jax.checkpoint` by hand; beside each the choice of the front
that saves no more. PyTorch has a process of its own, float32 on CPU, with jrc's parameters; loss,
gradients and products of both must agree, or the exit status is 1. Without PyTorch (`pip install
torch`) there is jrc's side alone.

Saved bytes are what forward hands to backward, each buffer once, without what it was given. FLOPs
are those of matrix products, forward and backward, over those with nothing re-run, which are the
same number in both. Peaks are not compared: a plan fits one, a budget of PyTorch is about saved
bytes.
"""

import argparse
import importlib.util
import json
import math
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax
from rich.console import Console
from rich.progress import Progress

from benchmarks._lib import platform as machine
from benchmarks._lib.gradient import Cache
from benchmarks._lib.report import terminal_table
from benchmarks._models.catalogue import MODELS, Model
from benchmarks.memory.plan import Planner
from benchmarks.pytorch import _front as peers_jrc
from benchmarks.pytorch._plot import plot
from benchmarks.pytorch._tables import tables
from jrc.models import gpt

BUDGETS = tuple(i / 10 for i in range(10, -1, -1))
PLANS = (0.0, 0.03, 0.06, 0.1, 0.15, 0.2, 0.25, 0.3)
FULL = {"budgets": BUDGETS, "blocks": (1, 3), "plans": PLANS}
TOY = {"budgets": (1.0, 0.3, 0.0), "blocks": (1,), "plans": (0.0, 0.5)}
# How far losses and gradients of two libraries may be apart, for the order of their sums.
CLOSE = 1e-5

Say = Callable[[str], None]


def given(model: Model) -> tuple[Any, np.ndarray]:
    """Parameters as a user starts with, and a batch of random tokens."""
    config = model.fn.keywords["config"]
    params = gpt.init(jax.random.key(0), config)
    tokens = np.random.default_rng(0).integers(0, config.vocabulary, model.args[1].shape)
    return params, tokens.astype(np.int32)


def truth(model: Model, args: Any) -> dict[str, float]:
    """Loss and norm of the gradient, as JAX computes them."""
    with jax.default_matmul_precision("highest"):
        loss, grads = jax.jit(jax.value_and_grad(model.fn))(*args)
    return {"loss": float(loss), "gradient_norm": float(optax.global_norm(grads))}


def of_torch(
    model: Model, args: Any, sizes: Mapping[str, Any], say: Say
) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the other process says of each way, as it comes; at the end `about`."""
    params, batch = args
    leaves = jax.tree_util.tree_leaves_with_path(params)
    named = {jax.tree_util.keystr(at, simple=True, separator="/"): leaf for at, leaf in leaves}
    settings = {name: sizes[name] for name in ("budgets", "blocks")}
    settings["heads"] = model.fn.keywords["config"].heads
    with tempfile.TemporaryDirectory() as folder:
        path, errors = pathlib.Path(folder, "given.npz"), pathlib.Path(folder, "errors")
        np.savez(path, batch=batch, **named)
        module = "benchmarks.pytorch._torch"
        command = [sys.executable, "-m", module, str(path), json.dumps(settings)]
        with (
            errors.open("w") as aside,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=aside, text=True) as process,
        ):
            for line in process.stdout or ():
                name, row = json.loads(line)
                say(f"PyTorch: {name}")
                yield name, row
        if process.returncode:
            raise RuntimeError(f"{module} failed:\n{errors.read_text()}")


def compare(planner: Planner, sizes: Mapping[str, Any], with_torch: bool, say: Say) -> Any:
    """Both sides, and beside every way jrc's cheapest choice that saves no more."""
    model = planner.model
    found: dict[str, Any] = {"nothing": peers_jrc.counted(planner, model.fn)}
    say("jrc: nothing re-run")
    if with_torch:
        args = given(model)
        found["jrc"] = truth(model, args)
        say("jrc: the gradient")
        found["ways"] = dict(of_torch(model, args, sizes, say))
        found["about"] = found["ways"].pop("about")
    front = peers_jrc.Front(planner)
    found["front"] = front.curve()
    say("jrc: the front")
    found["hand"] = dict(peers_jrc.by_hand(planner))
    say("jrc: by hand")
    found["plans"] = []
    for budget in sizes["plans"]:
        found["plans"].append(peers_jrc.planned(planner, budget))
        say(f"jrc: a plan for {budget}")
    rows = (*found.get("ways", {}).values(), *found["hand"].values(), *found["plans"])
    for row in rows:
        if "saved" in row:
            row["least"] = front.within(row["saved"])
    say("jrc: at the same saved bytes")
    return found


def broken(found: Mapping[str, Any]) -> Iterator[str]:
    """Where the two do not compute the same; without PyTorch nowhere."""
    if "ways" not in found:
        return
    loss, norm = found["jrc"]["loss"], found["jrc"]["gradient_norm"]
    if not math.isclose(other := found["about"]["gradient_norm"], norm, rel_tol=CLOSE):
        yield f"norm of the gradient: {other} in PyTorch, {norm} in JAX"
    products = found["nothing"]["product_flops"]
    if (other := found["ways"]["eager"]["product_flops"]) != products:
        yield f"product FLOPs with nothing re-run: {other:,} in PyTorch, {products:,} in JAX"
    for name, row in found["ways"].items():
        if "missing" in row:
            continue
        if not math.isclose(row["loss"], loss, rel_tol=CLOSE):
            yield f"{name}: the loss is {row['loss']} in PyTorch, {loss} in JAX"
        if row["gradients_differ"] > 10 * CLOSE:
            yield f"{name}: gradients differ by {row['gradients_differ']:.1e}"


def show(console: Console, report: Mapping[str, Any]) -> None:
    for title, rows in tables(report):
        console.print(terminal_table(title, rows))
    for name, row in report.get("ways", {}).items():
        if "missing" in row:
            console.print(f"{name}: not in this PyTorch ({row['missing']})")


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--toy", action="store_true", help="tiny, to see that it runs")
    machine.add_platform(parser)
    add("--out", type=pathlib.Path, help="JSON file to write")
    add("--plot", type=pathlib.Path, help="folder for peers.png")
    options = parser.parse_args(argv)
    machine.use(options.platform)
    console, sizes = Console(), TOY if options.toy else FULL
    if not (with_torch := importlib.util.find_spec("torch") is not None):
        console.print("PyTorch is missing, only jrc's side: pip install torch")
    model = MODELS["gpt"](options.toy)
    config = model.fn.keywords["config"]
    title = f"GPT {config.layers} x {config.width}, {config.length} x {model.args[1].shape[0]}"
    report = machine.device() | {"toy": options.toy, "model": title}
    ways = 3 + len(sizes["blocks"]) + len(sizes["budgets"])
    work = 4 + len(sizes["plans"]) + (ways if with_torch else 0)
    with Progress(console=console) as progress:
        task = progress.add_task(title, total=work)
        say: Say = lambda what: progress.update(task, advance=1, description=what)  # noqa: E731
        report |= compare(Planner(model, Cache(None)), sizes, with_torch, say)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    show(console, report)
    if options.plot and (path := plot(report, options.plot)):
        console.print(f"Written: {path}")
    said = list(broken(report))
    for line in said:
        console.print(f"[red]broken:[/red] {line}")
    if said:
        sys.exit(1)
    return report


if __name__ == "__main__":
    main()
