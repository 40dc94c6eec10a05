"""Compare PyTorch with jrc: what each recomputes to save as few bytes, on the same GPT.

    python -m benchmarks.pytorch.saved_bytes --out benchmarks/results/peers.json \
        --plot benchmarks/results

PyTorch: nothing recomputed, `torch.utils.checkpoint` of every block and of every 3, and
`activation_memory_budget` from 1.0 to 0.0 (`_torch.py` states how). jrc: the Pareto front of
choices by saved bytes, verified plans, and `jax.checkpoint` by hand. Beside each stands the choice
of the front that saves no more. PyTorch runs in a process of its own, float32 on CPU, with jrc's
parameters; loss, gradients and products of both must agree, or the exit status is 1. Without
PyTorch (`pip install torch`) only jrc's side is measured.

Saved bytes are what forward passes to backward, each buffer once, without arguments. FLOPs are
those of matrix products, forward and backward, over those with nothing recomputed, which are the
same number in both. Peaks are not compared: a plan fits a peak, a budget of PyTorch is about saved
bytes.
"""

import importlib.util
import math
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax

from benchmarks._lib import child
from benchmarks._lib.command import Benchmark, Run
from benchmarks._lib.gradient import Cache
from benchmarks._lib.report import Report
from benchmarks._models.catalogue import MODELS
from benchmarks._models.model import Model
from benchmarks._models.planner import Planner
from benchmarks.pytorch import _front
from benchmarks.pytorch._plot import plot
from benchmarks.pytorch._tables import tables
from jrc.models import gpt

BUDGETS = tuple(i / 10 for i in range(10, -1, -1))
PLANS = (0.0, 0.03, 0.06, 0.1, 0.15, 0.2, 0.25, 0.3)
FULL = {"budgets": BUDGETS, "blocks": (1, 3), "plans": PLANS}
TOY = {"budgets": (1.0, 0.3, 0.0), "blocks": (1,), "plans": (0.0, 0.5)}
# The relative difference that sums in another order may make between the two libraries.
CLOSE = 1e-5

Status = Callable[[str], None]


def measure(run: Run) -> None:
    """Measure both sides, or jrc's alone."""
    toy = run.options.toy
    if not (with_torch := importlib.util.find_spec("torch") is not None):
        run.console.print("PyTorch is missing, only jrc's side: pip install torch")
    model = MODELS["gpt"](toy)
    config = model.fn.keywords["config"]
    title = f"GPT {config.layers} x {config.width}, {config.length} x {model.args[1].shape[0]}"
    run.report |= run.about() | {"model": title}
    planner = Planner(model, Cache(None))
    run.report |= compare(planner, TOY if toy else FULL, with_torch, run.status)


def compare(planner: Planner, sizes: Mapping[str, Any], with_torch: bool, status: Status) -> Report:
    """Return both sides, and beside every way jrc's cheapest choice that saves no more."""
    model = planner.model
    status("jrc: nothing re-run")
    found: dict[str, Any] = {"nothing": _front.counted(planner, model.fn)}
    if with_torch:
        args = arguments(model)
        status("jrc: the gradient")
        found["jrc"] = reference(model, args)
        found["ways"] = dict(of_torch(model, args, sizes, status))
        found["about"] = found["ways"].pop("about")
    status("jrc: the front")
    front = _front.Front(planner)
    found["front"] = front.curve()
    status("jrc: by hand")
    found["hand"] = dict(_front.by_hand(planner))
    found["plans"] = []
    for budget in sizes["plans"]:
        status(f"jrc: a plan for {budget}")
        found["plans"].append(_front.planned(planner, budget))
    status("jrc: at the same saved bytes")
    for row in (*found.get("ways", {}).values(), *found["hand"].values(), *found["plans"]):
        if "saved" in row:
            row["least"] = front.within(row["saved"])
    return found


def arguments(model: Model) -> tuple[Any, np.ndarray]:
    """Return initial parameters and a batch of random tokens."""
    config = model.fn.keywords["config"]
    params = gpt.init(jax.random.key(0), config)
    tokens = np.random.default_rng(0).integers(0, config.vocabulary, model.args[1].shape)
    return params, tokens.astype(np.int32)


def reference(model: Model, args: Any) -> dict[str, float]:
    """Return the loss and the norm of the gradient, as JAX computes them."""
    with jax.default_matmul_precision("highest"):
        loss, grads = jax.jit(jax.value_and_grad(model.fn))(*args)
    return {"loss": float(loss), "gradient_norm": float(optax.global_norm(grads))}


def of_torch(
    model: Model, args: Any, sizes: Mapping[str, Any], status: Status
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each way's name and figures from the process with PyTorch; at the end `about`."""
    params, batch = args
    leaves = jax.tree_util.tree_leaves_with_path(params)
    named = {jax.tree_util.keystr(at, simple=True, separator="/"): leaf for at, leaf in leaves}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "arguments.npz")
        np.savez(path, batch=batch, **named)
        settings = {
            "arguments": str(path),
            "heads": model.fn.keywords["config"].heads,
            "budgets": sizes["budgets"],
            "blocks": sizes["blocks"],
        }
        for name, row in child.results_of("pytorch._torch", settings):
            status(f"PyTorch: {name}")
            yield name, row


def problems(found: Report) -> Iterator[str]:
    """Yield where the two sides do not compute the same."""
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


BENCHMARK = Benchmark(
    "pytorch.saved_bytes", __doc__, measure, tables, problems=problems, plot=plot
)  # fmt: skip
main = BENCHMARK.main

if __name__ == "__main__":
    main()
