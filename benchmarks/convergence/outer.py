"""Measure held-out loss against bytes and rounds: AdamW dense, SparseLoCo, DiLoCo, EF21, DGC.

    python -m benchmarks.convergence.outer --out benchmarks/results/outer.json \
        --plot benchmarks/results
    python -m benchmarks.convergence.outer --methods adamw,sparseloco_15 --seeds 3

A byte-level GPT on the standard library's source, trained by four replicas on equal batches of the
whole. AdamW has the same rate, schedule and clipping in every method; with an outer optimizer each
replica clips its own gradient. EF21 gives AdamW a compressed gradient in every step, after dense
ones in the first fortieth of the run. DGC is momentum SGD with the rate of `convergence.train`.
AdamW's rate was not searched, and outer optimizers have their defaults.

`--out` is written after every run, and runs that it has are not repeated: the same command
continues an interrupted table.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

import jrc
from benchmarks._lib import platform
from benchmarks._lib.command import Benchmark, Run, at_least, names_of
from benchmarks._lib.report import Report
from benchmarks._lib.table import Table
from benchmarks._private import network_text
from benchmarks.convergence._outer_plot import plot
from benchmarks.convergence._tasks import SHARED, TASKS, Settings, Task
from benchmarks.convergence._trainer import WARM_UP, evaluated
from jrc.outer_optimizers import OuterOptimizer

NAME = "convergence.outer"
REPLICAS = 4
SIZES: Settings = {
    "layers": 2, "heads": 4, "width": 64, "length": 64, "batch": 16, "steps": 4000,
    "rate": 3e-3, "weight_decay": 0.1, "b2": 0.95, "sgd_rate": 0.3, "min_size": 2048,
}  # fmt: skip
TOY: Settings = {"layers": 1, "width": 32, "length": 16, "batch": 8, "steps": 6, "evaluations": 2}
HEADS = (
    "", "seeds", "exchanges", "held-out", "to dense", "training", "sent", "largest exchange",
    "less than dense", "seconds",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to train four replicas.

    Attributes:
        title: For a table.
        outer: The outer optimizer; `None` exchanges in every step.
        dgc: Whether the optimizer is DGC and not AdamW.
        ef21: Whether AdamW has the gradient that EF21 estimates.
    """

    title: str
    outer: OuterOptimizer | None = None
    dgc: bool = False
    ef21: bool = False


def _sparse(every: int, **options: Any) -> Method:
    return Method(_title("SparseLoCo", every, options), jrc.SparseLoCo(every, **options))


def _diloco(every: int, **options: Any) -> Method:
    return Method(_title("DiLoCo", every, options), jrc.DiLoCo(every, **options))


def _title(name: str, every: int, options: Mapping[str, Any]) -> str:
    text = "".join(f", {key}={value}" for key, value in options.items())
    return f"{name}, every {every}{text}"


METHODS: Mapping[str, Method] = {
    "adamw": Method("AdamW, dense"),
    "sparseloco_1": _sparse(1),
    "sparseloco_5": _sparse(5),
    "sparseloco_15": _sparse(15),
    "sparseloco_30": _sparse(30),
    "sparseloco_15_d16": _sparse(15, density=1 / 16),
    "sparseloco_15_all": _sparse(15, mean="all"),
    "sparseloco_15_chunk": _sparse(15, levels="chunk"),
    "sparseloco_15_f32": _sparse(15, wire="f32"),
    "sparseloco_15_f3": _sparse(15, fragments=3),
    "sparseloco_15_overlap": _sparse(15, overlap=1),
    "diloco_15": _diloco(15),
    "diloco_15_4bit": _diloco(15, wire="4bit"),
    "diloco_30": _diloco(30),
    "diloco_30_4bit": _diloco(30, wire="4bit"),
    "diloco_30_f3": _diloco(30, fragments=3),
    "diloco_30_overlap": _diloco(30, overlap=1),
    "diloco_30_overlap_b0": _diloco(30, overlap=1, blend=0.0),
    "diloco_30_4bit_f3_overlap": _diloco(30, wire="4bit", fragments=3, overlap=1),
    "average_30": Method("plain averaging, every 30", jrc.DiLoCo(30, 1.0, 0.0)),
    "ef21": Method("EF21 99 %, AdamW", ef21=True),
    "dgc": Method("DGC 99.9 %, momentum SGD", dgc=True),
}


def optimizer(method: Method, settings: Settings) -> optax.GradientTransformation:
    """Return the optimizer of a method: the inner one, where there is an outer one."""
    peak = settings["sgd_rate" if method.dgc else "rate"]
    steps = settings["steps"]
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, max(1, steps // 20), steps)
    if method.dgc:
        return jrc.dgc_momentum(
            rate,
            settings["momentum"],
            0,
            max(1, steps // 10),
            WARM_UP,
            local_grad_clip_norm=settings["clip"],
            axis_name="data",
            min_size=settings["min_size"],
        )
    clip, decay = optax.clip_by_global_norm(settings["clip"]), settings["weight_decay"]
    if method.ef21:
        estimate = jrc.scale_by_ef21(
            0.1,
            rampup_begin_step=max(1, steps // 40),
            axis_name="data",
            min_size=settings["min_size"],
        )
        adam = optax.scale_by_adam(b1=0.0, b2=settings["b2"])
        scaled = optax.add_decayed_weights(decay), optax.scale_by_learning_rate(rate)
        return optax.chain(clip, estimate, adam, *scaled)
    return optax.chain(clip, optax.adamw(rate, b2=settings["b2"], weight_decay=decay))


def train(method: Method, task: Task, seed: int, status: Any) -> Report:
    """Return the record of one run: its curve, rounds, bytes and seconds."""
    began = time.perf_counter()
    mesh = Mesh(jax.devices()[:REPLICAS], ("data",))
    tx, steps = optimizer(method, task.settings), task.settings["steps"]
    params, _ = task.init(jax.random.key(seed))
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    key = jax.random.key(seed + 1)
    state = jrc.init_state(params, tx, key, mesh=mesh, outer=method.outer)
    step = jrc.make_train_step(task.loss_fn, tx, mesh=mesh, outer=method.outer)
    points, curve = evaluated(steps, task.settings["evaluations"]), []
    sent, largest, rounds, losses = 0.0, 0.0, 0, []
    for i in range(steps):
        state, info = step(state, task.batch_of(seed, i))
        sent += float(info.bytes_sent)
        largest = max(largest, float(info.bytes_sent))
        rounds += bool(info.synchronised)
        losses.append(info.loss if info.losses is None else info.losses)
        if i + 1 in points:
            held_out = task.evaluate(jax.device_get(state.params), None)["loss"]
            trained = task.per_nat * float(np.mean([np.mean(x) for x in losses]))
            point = {"step": i + 1, "rounds": rounds, "bytes": sent}
            curve.append({**point, "train_loss": trained, "loss": held_out})
            losses = []
            status(f"step {i + 1:,} of {steps:,}, {held_out:.3f} {task.unit}")
    return {
        "curve": curve,
        "rounds": rounds,
        "bytes_sent": sent,
        "bytes_largest": largest,
        "bytes_dense": steps * 2 * (REPLICAS - 1) / REPLICAS * 4 * size,
        "parameters": size,
        "seconds": time.perf_counter() - began,
        "device": f"{REPLICAS} x {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
    }


def measure(run: Run) -> None:
    """Do every run that the report lacks."""
    options = run.options
    platform.require_devices(REPLICAS, NAME)
    settings = SHARED | SIZES | (TOY if options.toy else {})
    settings["steps"] = options.steps or settings["steps"]
    task = TASKS["gpt"](settings)
    made = run.report.setdefault("settings", task.settings)
    if differ := [k for k in made | task.settings if made.get(k) != task.settings.get(k)]:
        sys.exit(
            f"{NAME}: --out must have runs with equal {', '.join(differ)}, got others in "
            f"{options.out}. Ask for the same, or write to another file."
        )
    runs = run.report.setdefault("runs", {})
    run.report |= {"title": task.title, "unit": task.unit}
    for name, seed in _lacking(options, runs):
        status = lambda text, what=f"{name}, seed {seed}": run.status(f"{what}: {text}")  # noqa: E731
        runs.setdefault(name, {})[str(seed)] = train(METHODS[name], task, seed, status)
        run.report["runs"] = {m: runs[m] for m in METHODS if m in runs}
        runs = run.report["runs"]
        run.save()


def _lacking(options: argparse.Namespace, runs: Report) -> Iterator[tuple[str, int]]:
    for seed in range(options.seeds):
        for name in options.methods:
            if str(seed) not in runs.get(name, {}):
                yield name, seed


def tables(report: Report) -> list[Table]:
    """Return one table with a row for each method."""
    runs = report["runs"]
    if not runs:
        return []
    dense = runs.get("adamw", {})
    rows = []
    for name, seeds in runs.items():
        first = next(iter(seeds.values()))
        loss, trained = _mean(seeds, "loss"), _mean(seeds, "train_loss")
        rows.append((
            METHODS[name].title,
            str(len(seeds)),
            f"{first['rounds']:,}",
            f"{loss:.3f}",
            "-" if name == "adamw" else _to_dense(seeds, dense),
            f"{trained:.3f}",
            network_text(first["bytes_sent"]),
            _largest_text(first),
            _less(first),
            f"{statistics.fmean(each['seconds'] for each in seeds.values()):.0f}",
        ))  # fmt: skip
    settings = report["settings"]
    title = (
        f"{report['title']} ({first['parameters']:,} parameters, {settings['steps']:,} steps of "
        f"{settings['batch']} x {settings['length']} bytes on {REPLICAS} replicas): held-out loss "
        f"at the end, {report['unit']}, mean of the seeds and difference to dense with the same "
        "seeds (range of several), training loss before it, and what a replica sent in the run"
    )
    return [Table(title, HEADS, rows)]


def _to_dense(seeds: Mapping[str, Any], dense: Mapping[str, Any]) -> str:
    """Return how far the loss is from dense with equal seeds: mean, and range of several."""
    both = sorted(seeds.keys() & dense.keys())
    if not both:
        return "-"
    gaps = [_mean({0: seeds[s]}, "loss") / _mean({0: dense[s]}, "loss") - 1 for s in both]
    spread = f" ({min(gaps):+.1%} to {max(gaps):+.1%})" if len(gaps) > 1 else ""
    return f"{statistics.fmean(gaps):+.1%}{spread}"


def _largest_text(record: Mapping[str, Any]) -> str:
    """Return the bytes of the largest exchange; older runs have exchanges of equal size."""
    equal = record["bytes_sent"] / max(record["rounds"], 1)
    return network_text(record.get("bytes_largest", equal))


def _less(record: Mapping[str, Any]) -> str:
    sent = record["bytes_sent"]
    return f"{record['bytes_dense'] / sent:,.0f} x" if sent else "-"


def _mean(seeds: Mapping[str, Any], figure: str) -> float:
    ends = [each["curve"][-1][figure] for each in seeds.values()]
    return statistics.fmean(ends) if ends else float("nan")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add methods and the number of runs."""
    add = parser.add_argument
    add("--methods", type=names_of(METHODS), default=list(METHODS), help="default: all")
    add("--seeds", type=at_least(1), default=1, help="runs of each (default: %(default)s)")
    add("--steps", type=at_least(1), help="steps of a run (default: 4000)")


BENCHMARK = Benchmark(NAME, __doc__, measure, tables, add_options, keys=("runs",), plot=plot)
main = BENCHMARK.main

if __name__ == "__main__":
    main()
