"""Compare PyTorch with jrc: what each recomputes to save as few bytes, on the same programs.

    python -m benchmarks.pytorch.saved_bytes --out benchmarks/results/peers.json \
        --plot benchmarks/results
    python -m benchmarks.pytorch.saved_bytes --models unet,densenet --toy

The programs are those of `_programs.py`: a GPT, a vision transformer, and those of `tests/zoo` that
are easily written in PyTorch too (`_twins`). PyTorch: the baseline, `torch.utils.checkpoint`
of every block (of the GPT also of every 3), and `activation_memory_budget` between 1.0 and 0.0 and
at what jrc's plans save (`_torch.py` states how). jrc: the Pareto front of choices by saved
bytes, verified plans, and `jax.checkpoint` by hand. Beside each stands the choice of the front that
saves no more. PyTorch runs in a process of its own, float32 on CPU, with jrc's parameters; loss,
gradients and products of both must agree, or the exit status is 1. Without PyTorch (`pip install
torch`) only jrc's side is measured. Programs that are not asked for stay in `--out` as they were.

Saved bytes are what forward passes to backward, each buffer once, without arguments. FLOPs are
those of matrix products and convolutions, forward and backward, over those of the baseline,
which are the same number in both. Peaks are not compared: a plan fits a peak, a budget of PyTorch
is about saved bytes.
"""

import argparse
import math
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import optax

from benchmarks._lib import child, platform
from benchmarks._lib.command import Benchmark, Run, names_of
from benchmarks._lib.gradient import Cache
from benchmarks._lib.report import Report
from benchmarks._models.planner import Planner
from benchmarks.pytorch import _front
from benchmarks.pytorch._plot import plot
from benchmarks.pytorch._programs import PROGRAMS, Program, asked_for, has_torch
from benchmarks.pytorch._tables import tables

FULL = {"budgets": (1.0, 0.5, 0.25), "plans": (0.25, 0.0)}
GPT = {
    "budgets": tuple(i / 10 for i in range(10, -1, -1)),
    "plans": (0.0, 0.03, 0.06, 0.1, 0.15, 0.2, 0.25, 0.3),
}
"""The sizes of the GPT, which the picture is of."""
TOY = {"budgets": (1.0, 0.3, 0.0), "plans": (0.0, 0.5)}

Status = Callable[[str], None]


def measure(run: Run) -> None:
    """Measure both sides of each program that was asked for, or jrc's alone."""
    run.report |= platform.machine()
    models = run.report.setdefault("models", {})
    for name, program in asked_for(run):
        sizes = TOY if run.options.toy else GPT if name == "gpt" else FULL

        def status(text: str, name: str = name) -> None:
            run.status(f"{name}: {text}")

        models[name] = compare(name, program, sizes, has_torch(), status)
        run.save()


def compare(
    name: str, program: Program, sizes: Mapping[str, Any], with_torch: bool, status: Status
) -> Report:
    """Return both sides, and beside every way jrc's cheapest choice that saves no more."""
    planner = Planner(program.model, Cache(None))
    found: dict[str, Any] = {"title": program.model.title, "tolerance": program.tolerance}
    status("jrc, the baseline")
    found["nothing"] = _front.counted(planner, program.model.fn)
    status("jrc, by hand")
    found["hand"] = dict(_front.by_hand(planner))
    found["plans"] = []
    for budget in sizes["plans"]:
        status(f"jrc, a plan for {budget}")
        found["plans"].append(_front.planned(planner, budget))
    if with_torch:
        status("jrc, the gradient")
        found["jrc"] = reference(program)
        saved = [row["saved"] for row in found["plans"]]
        found["ways"] = dict(of_torch(name, program, sizes["budgets"], saved, status))
        found["about"] = found["ways"].pop("about")
    status("jrc, the front")
    front = _front.Front(planner)
    found["front"] = front.curve()
    status("jrc, at the same saved bytes")
    for row in (*found.get("ways", {}).values(), *found["hand"].values(), *found["plans"]):
        if "saved" in row:
            row["least"] = front.within(row["saved"])
    return found


def reference(program: Program) -> dict[str, float]:
    """Return the loss and the norm of the gradient, as JAX computes them."""
    gradient = jax.value_and_grad(program.model.fn, has_aux=program.model.has_aux)
    with jax.default_matmul_precision("highest"):
        out, grads = jax.jit(gradient)(*program.args)
    loss = out[0] if program.model.has_aux else out
    return {"loss": float(loss), "gradient_norm": float(optax.global_norm(grads))}


def of_torch(
    name: str, program: Program, budgets: Any, saved: Any, status: Status
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each way's name and figures from the process with PyTorch; at the end `about`."""
    with tempfile.TemporaryDirectory() as folder:
        path = program.written(pathlib.Path(folder))
        settings = {
            "twin": name,
            "options": program.options,
            "arguments": str(path),
            "budgets": budgets,
            "saved": saved,
            "sizes": program.sizes,
        }
        for way, row in child.results_of("pytorch._torch", settings):
            status(f"PyTorch, {way}")
            yield way, row


def problems(report: Report) -> Iterator[str]:
    """Yield where the two sides do not compute the same."""
    for name, found in report["models"].items():
        if "ways" in found:
            yield from (f"{name}: {text}" for text in _differences(found))


def _differences(found: Report) -> Iterator[str]:
    close, loss, norm = found["tolerance"], found["jrc"]["loss"], found["jrc"]["gradient_norm"]
    if not math.isclose(other := found["about"]["gradient_norm"], norm, rel_tol=close):
        yield f"norm of the gradient: {other} in PyTorch, {norm} in JAX"
    products = found["nothing"]["product_flops"]
    if (other := found["ways"]["eager"]["product_flops"]) != products:
        yield f"product FLOPs of the baseline: {other:,} in PyTorch, {products:,} in JAX"
    for name, row in found["ways"].items():
        if "missing" in row:
            continue
        if not math.isclose(row["loss"], loss, rel_tol=close):
            yield f"{name}: the loss is {row['loss']} in PyTorch, {loss} in JAX"
        if row["gradients_differ"] > 10 * close:
            yield f"{name}: gradients differ by {row['gradients_differ']:.1e}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the programs."""
    parser.add_argument(
        "--models", type=names_of(PROGRAMS), default=list(PROGRAMS), help="default: all"
    )


BENCHMARK = Benchmark(
    "pytorch.saved_bytes", __doc__, measure, tables, add_options, keys=("toy", "models"),
    problems=problems, plot=plot,
)  # fmt: skip
main = BENCHMARK.main

if __name__ == "__main__":
    main()
