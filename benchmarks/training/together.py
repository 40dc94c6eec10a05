"""Measure recomputation and compression in one train step of a GPT: neither, either, both.

    python -m benchmarks.training.together --platform cpu --out benchmarks/results/together.json

The four steps are trained side by side on the same batches of real text, by four replicas, in
turns, so that other load affects all of them alike. Peaks are those of the compiled whole step of
one replica; the budget is a quarter of the way from the least reachable peak to that of nothing
recomputed. Times are of the steps after warm-up, as ratios to the step with neither in the same
round.
"""

import argparse
import functools
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

import jrc
from benchmarks._lib import platform
from benchmarks._lib.command import Benchmark, Run, at_least
from benchmarks._lib.examples import batch_at, read_text, split_text
from benchmarks._lib.report import Report
from benchmarks._lib.table import Row, Table
from benchmarks._lib.timing import quartiles, ratios
from benchmarks._private import memory_text, network_text
from jrc.models import gpt

NAME = "training.together"
REPLICAS, BUDGET, RATE, MOMENTUM = 4, 0.25, 0.3, 0.9
LEVELS = (0.75, 0.9375, 0.984375, 0.996, 0.999)
SIZES = {"layers": 6, "width": 128, "heads": 4, "length": 128}
TOY_SIZES = {"layers": 1, "width": 64, "heads": 2, "length": 32}
TOY = {"steps": 8, "seeds": 1}
# For each way: whether it recomputes within the budget, and whether it compresses.
WAYS = {
    "neither": (False, False),
    "recomputation": (True, False),
    "DGC": (False, True),
    "both": (True, True),
}


class Study:
    """The model, its text and the four train steps."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.config = gpt.Config(**(TOY_SIZES if options.toy else SIZES))
        self.train, self.held_out = split_text(read_text(options.text), self.config.length)
        self.mesh = Mesh(jax.devices()[:REPLICAS], ("data",))
        self.loss = functools.partial(gpt.loss, config=self.config)
        self.optimizers = {name: self._optimizer(dgc) for name, (_, dgc) in WAYS.items()}
        self.steps = {
            name: jrc.make_train_step(
                self.loss,
                self.optimizers[name],
                mesh=self.mesh,
                memory_budget=BUDGET if lean else None,
            )
            for name, (lean, _) in WAYS.items()
        }
        # Without a key there is no dropout.
        self._test = jax.jit(lambda params, batch: self.loss(params, batch, None))

    def _optimizer(self, dgc: bool) -> optax.GradientTransformation:
        steps = self.options.steps
        rate = optax.warmup_cosine_decay_schedule(0.0, RATE, max(1, steps // 20), steps)
        if not dgc:
            return optax.sgd(rate, momentum=MOMENTUM)
        return jrc.dgc_momentum(
            rate, MOMENTUM, 0, max(1, steps // 4), LEVELS, local_grad_clip_norm=1.0,
            min_size=4096, axis_name="data",
        )  # fmt: skip

    def start(self, name: str, seed: int) -> jrc.TrainState:
        """Return the initial state of a way."""
        params = gpt.init(jax.random.key(seed), self.config)
        key = jax.random.key(seed + 1)
        return jrc.init_state(params, self.optimizers[name], key, mesh=self.mesh)

    def batch(self, seed: int, i: int) -> np.ndarray:
        """Return the batch of a step, for all replicas together."""
        count = REPLICAS * self.options.batch
        return batch_at(self.train, i, count, self.config.length, seed)

    def held_out_loss(self, state: jrc.TrainState) -> float:
        """Return the mean loss on held-out text, nats per byte."""
        params = jax.device_get(state.params)
        tests = (batch_at(self.held_out, i, 8, self.config.length, 0) for i in range(8))
        return float(np.mean([self._test(params, batch) for batch in tests]))

    def peak(self, name: str) -> int:
        """Return the peak of one replica's compiled step, bytes."""
        return self.steps[name].memory(self.start(name, 0), self.batch(0, 0)).peak


def one_seed(study: Study, seed: int, status: Callable[[int], None]) -> dict[str, Any]:
    """Train all four ways with one seed, step by step in turns."""
    states = {name: study.start(name, seed) for name in WAYS}
    rows: dict[str, Any] = {n: {"seconds": [], "bytes": [], "losses": []} for n in WAYS}
    for i in range(study.options.steps):
        batch = study.batch(seed, i)
        for name, step in study.steps.items():
            began = time.perf_counter()
            states[name], info = step(states[name], batch)
            rows[name]["losses"].append(float(info.loss))
            rows[name]["seconds"].append(time.perf_counter() - began)
            rows[name]["bytes"].append(float(info.bytes_sent))
        status(i + 1)
    for name, state in states.items():
        rows[name]["held_out"] = study.held_out_loss(state)
    return rows


def summary(runs: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return losses of all seeds, and times of the steps after the warm-up of the compression."""
    first = len(runs[0][name]["seconds"]) // 4 + 1
    times = [
        ratio
        for run in runs
        for ratio in ratios(run[name]["seconds"][first:], run["neither"]["seconds"][first:])
    ]
    return {
        "held_out": [run[name]["held_out"] for run in runs],
        "bytes_sent": sum(runs[0][name]["bytes"]),
        "bytes_sent_last": runs[0][name]["bytes"][-1],
        "time": quartiles(times),
        "losses": runs[0][name]["losses"],
    }


def measure(run: Run) -> None:
    """Train all seeds and add peaks and FLOPs."""
    options = run.options
    platform.require_devices(REPLICAS, NAME)
    study, about = Study(options), run.about()
    runs = [
        one_seed(study, seed, lambda i, seed=seed: run.status(f"seed {seed}, step {i}"))
        for seed in range(options.seeds)
    ]
    ways = {name: summary(runs, name) for name in WAYS}
    for name, way in ways.items():
        run.status(f"{name}: peak")
        plan = study.steps[name].plan
        cost = plan and (plan.verified or plan.predicted)
        way |= {"peak": study.peak(name), "flops": cost.flops_ratio if cost else 1.0}
    size = study.config
    run.report |= about | {
        "steps": options.steps, "replicas": REPLICAS, "budget": BUDGET,
        "model": f"GPT {size.layers} x {size.width}, {size.length} x {options.batch}", "ways": ways,
    }  # fmt: skip


def tables(report: Report) -> list[Table]:
    """Return the table of the four ways."""
    title = (
        f"{report['model']}, {report['steps']} steps on {report['replicas']} replicas "
        f"({report['device']}, jax {report['jax']}, {report['cores']} cores, load "
        f"{report['load']:.0f} as it began): peak of one replica's compiled step, FLOPs of a "
        "gradient over those of the baseline, bytes that a replica sends, time of a "
        "step over that with neither (quartiles), loss in nats per byte "
        f"of held-out text (mean of {len(report['ways']['both']['held_out'])} seeds, half the "
        "range)"
    )
    heads = ("", "peak of the step", "FLOPs", "sent in all", "of dense", "at the last step",
             "time", "held-out loss")  # fmt: skip
    base = report["ways"]["neither"]
    return [Table(title, heads, [_row(name, at, base) for name, at in report["ways"].items()])]


def _row(name: str, at: dict[str, Any], base: dict[str, Any]) -> Row:
    low, middle, high = at["time"]
    spread = max(at["held_out"]) - min(at["held_out"])
    return (
        name,
        memory_text(at["peak"]),
        f"{at['flops']:.3f}",
        network_text(at["bytes_sent"]),
        f"1/{base['bytes_sent'] / at['bytes_sent']:.1f}",
        f"1/{base['bytes_sent_last'] / at['bytes_sent_last']:.0f}",
        f"{middle:.2f} ({low:.2f}–{high:.2f})",
        f"{statistics.mean(at['held_out']):.3f} ±{spread / 2:.3f}",
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the length of the runs and their data."""
    add = parser.add_argument
    add("--steps", type=at_least(1), default=400)
    add("--seeds", type=at_least(1), default=3)
    add("--batch", type=at_least(1), default=4, help="sequences of a replica")
    add("--text", type=pathlib.Path, help="file or folder (default: the standard library's source)")


BENCHMARK = Benchmark(NAME, __doc__, measure, tables, add_options, toy=TOY)
main = BENCHMARK.main

if __name__ == "__main__":
    main()
