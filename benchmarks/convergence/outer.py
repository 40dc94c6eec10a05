"""Measure held-out loss against bytes and rounds: AdamW dense, SparseLoCo, DiLoCo, EF21, DGC.

    python -m benchmarks.convergence.outer --out benchmarks/results/outer.json \
        --plot benchmarks/results
    python -m benchmarks.convergence.outer --methods adamw,sparseloco_15 --seeds 3
    python -m benchmarks.convergence.outer --replicas 8 --out benchmarks/results/outer.json
    python -m benchmarks.convergence.outer --layers 4 --width 128 \
        --out benchmarks/results/outer_wide.json

A byte-level GPT on the standard library's source, trained by four replicas on equal batches of the
whole; `--replicas 8` divides the same batches among eight, whose runs have tables of their own.
AdamW has the same rate, schedule and clipping in every method; with an outer optimizer each replica
clips its own gradient. EF21 gives AdamW a compressed gradient in every step, after dense ones in
the first fortieth of the run. DGC is momentum SGD with the rate of `convergence.train`. AdamW's
rate is 3e-3 in all methods (`convergence.rates` searches it), and outer optimizers have their
defaults. Other tables have the loss against modelled wall-clock.

`--out` is written after every run, and runs that it has are not repeated: the same command
continues an interrupted table.
"""

import argparse
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
from benchmarks.convergence._outer_clock import clock_table
from benchmarks.convergence._outer_methods import (
    METHODS,
    REPLICAS,
    Method,
    by_replicas,
    run_name,
)
from benchmarks.convergence._outer_plot import plot
from benchmarks.convergence._tasks import SHARED, TASKS, Settings, Task
from benchmarks.convergence._trainer import WARM_UP, evaluated

NAME = "convergence.outer"
SIZES: Settings = {
    "layers": 2, "heads": 4, "width": 64, "length": 64, "batch": 16, "steps": 4000,
    "rate": 3e-3, "weight_decay": 0.1, "b2": 0.95, "sgd_rate": 0.3, "min_size": 2048,
}  # fmt: skip
TOY: Settings = {"layers": 1, "width": 32, "length": 16, "batch": 8, "steps": 6, "evaluations": 2}
HEADS = (
    "", "seeds", "exchanges", "held-out", "to dense", "training", "sent", "largest exchange",
    "less than dense", "seconds",
)  # fmt: skip


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


def train(method: Method, task: Task, replicas: int, seed: int, status: Any) -> Report:
    """Return the record of one run: its curve, rounds, bytes and seconds."""
    began = time.perf_counter()
    mesh = Mesh(jax.devices()[:replicas], ("data",))
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
        "bytes_dense": steps * 2 * (replicas - 1) / replicas * 4 * size,
        "parameters": size,
        "replicas": replicas,
        "seconds": time.perf_counter() - began,
        "device": f"{replicas} x {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
    }


def measure(run: Run) -> None:
    """Do every run that the report lacks."""
    options = run.options
    platform.require_devices(options.replicas, NAME)
    settings = SHARED | SIZES | (TOY if options.toy else {})
    asked = {name: getattr(options, name) for name in ("steps", "layers", "width")}
    settings |= {name: value for name, value in asked.items() if value}
    task = TASKS["gpt"](settings)
    made = run.report.setdefault("settings", task.settings)
    if differ := [k for k in made | task.settings if made.get(k) != task.settings.get(k)]:
        sys.exit(
            f"{NAME}: --out must have runs with equal {', '.join(differ)}, got others in "
            f"{options.out}. Ask for the same, or write to another file."
        )
    runs = run.report.setdefault("runs", {})
    run.report |= {"title": task.title, "unit": task.unit}
    for method, seed in _lacking(options, runs):
        name = run_name(method, options.replicas)
        status = lambda text, what=f"{name}, seed {seed}": run.status(f"{what}: {text}")  # noqa: E731
        record = train(METHODS[method], task, options.replicas, seed, status)
        runs.setdefault(name, {})[str(seed)] = record
        runs = run.report["runs"] = _in_order(runs)
        run.save()


def _lacking(options: argparse.Namespace, runs: Report) -> Iterator[tuple[str, int]]:
    for seed in range(options.seeds):
        for name in options.methods:
            if str(seed) not in runs.get(run_name(name, options.replicas), {}):
                yield name, seed


def _in_order(runs: Report) -> Report:
    grouped = by_replicas(runs)
    return {run_name(m, n): seeds for n in grouped for m, seeds in grouped[n].items()}


def tables(report: Report) -> list[Table]:
    """Return two tables for each number of replicas: loss and bytes, loss and time."""
    grouped = by_replicas(report["runs"])
    losses = [loss_table(count, methods, report) for count, methods in grouped.items()]
    clocks = [clock_table(count, methods, report) for count, methods in grouped.items()]
    return losses + clocks


def loss_table(replicas: int, methods: Mapping[str, Any], report: Report) -> Table:
    """Return loss, rounds and bytes of each method on so many replicas."""
    dense = methods.get("adamw", {})
    rows = [_loss_row(name, seeds, dense) for name, seeds in methods.items()]
    settings, first = report["settings"], next(iter(next(iter(methods.values())).values()))
    title = (
        f"{report['title']} ({first['parameters']:,} parameters, {settings['steps']:,} steps of "
        f"{settings['batch']} x {settings['length']} bytes on {replicas} replicas): held-out loss "
        f"at the end, {report['unit']}, mean of the seeds and difference to dense with the same "
        "seeds (range of several), training loss before it, and what a replica sent in the run"
    )
    return Table(title, HEADS, rows)


def _loss_row(name: str, seeds: Mapping[str, Any], dense: Mapping[str, Any]) -> tuple[str, ...]:
    first = next(iter(seeds.values()))
    return (
        METHODS[name].title,
        str(len(seeds)),
        f"{first['rounds']:,}",
        f"{_mean(seeds, 'loss'):.3f}",
        "-" if name == "adamw" else to_dense(seeds, dense),
        f"{_mean(seeds, 'train_loss'):.3f}",
        network_text(first["bytes_sent"]),
        _largest_text(first),
        _less(first),
        f"{statistics.fmean(each['seconds'] for each in seeds.values()):.0f}",
    )


def to_dense(seeds: Mapping[str, Any], dense: Mapping[str, Any]) -> str:
    """Return how far the loss is from dense with equal seeds: mean, and range of several."""
    return gaps_text(*({s: _mean({0: x[s]}, "loss") for s in x} for x in (seeds, dense)))


def gaps_text(losses: Mapping[str, float], dense: Mapping[str, float]) -> str:
    """Return how far losses, by seed, are from those of dense training."""
    both = sorted(losses.keys() & dense.keys())
    if not both:
        return "-"
    gaps = [losses[seed] / dense[seed] - 1 for seed in both]
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
    several = [name for name, method in METHODS.items() if method.replicas is None]
    add("--methods", type=names_of(several), default=several, help="default: all")
    add("--replicas", type=replicas_of, default=REPLICAS, help="2, 4 or 8 (default: %(default)s)")
    add("--seeds", type=at_least(1), default=1, help="runs of each (default: %(default)s)")
    add("--steps", type=at_least(1), help="steps of a run (default: 4000)")
    add("--layers", type=at_least(1), help="layers of the GPT (default: 2)")
    add("--width", type=width, help="width of the GPT (default: 64)")


def replicas_of(text: str) -> int:
    """Return a number of replicas that divides the batch, at full and at toy size."""
    count = at_least(2)(text)
    if SIZES["batch"] % count or TOY["batch"] % count:
        rule = f"must divide the batch, {SIZES['batch']} and with --toy {TOY['batch']}"
        raise argparse.ArgumentTypeError(f"{rule}, got {text}.")
    return count


def width(text: str) -> int:
    """Return a width that the heads divide."""
    number, heads = at_least(1)(text), SIZES["heads"]
    if number % heads:
        raise argparse.ArgumentTypeError(f"must be a multiple of the {heads} heads, got {text}.")
    return number


BENCHMARK = Benchmark(NAME, __doc__, measure, tables, add_options, keys=("runs",), plot=plot)
main = BENCHMARK.main

if __name__ == "__main__":
    main()
