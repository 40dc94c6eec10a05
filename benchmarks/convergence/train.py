"""Measure where training ends: deep gradient compression at 99.9 % beside dense momentum SGD.

    python -m benchmarks.convergence.train --out benchmarks/results/convergence.json \
        --plot benchmarks/results
    python -m benchmarks.convergence.train --tasks gpt,lstm --seeds 1

Three tasks: a ResNet-20 on scikit-learn's digits (`--data PATH`: CIFAR-10), a byte-level GPT and a
byte-level LSTM on the standard library's source. Each is trained by dense momentum SGD and by DGC
on 4 and 8 replicas; by DGC on 4 without each of momentum correction, factor masking, local clipping
and warm-up; by DGC on 4 up to 99 %, with factor masking and without; and dense on 4 without
clipping. Everything runs through `jrc.make_train_step`; on a CPU the replicas are virtual.

All methods have the same parameters, batches, rate, momentum and bound C of the gradient: dense
clips the mean gradient's norm to C, DGC each tensor's local one to C sqrt(N). The whole batch does
not depend on the number of replicas. The rate was chosen for dense alone among those in
`_tasks.TRIED`; it rises for a twentieth of the steps and falls as a cosine. DGC passes through five
levels of sparsity in a tenth of the steps, and tensors below `min_size` stay dense.

The number of steps matters: at 99.9 % on four replicas four entries in a thousand are updated in a
step, so an entry waits for 250 steps on average, at 99 % for 25. The tasks are small enough, and
runs short enough, for the whole table to take about three hours on a few cores; the paper's
shortest run has some ten thousand steps.

Sizes and numbers of steps, unlike the rate, were chosen after trials in which DGC was seen too. An
LSTM of 2 x 128 with 8,000 steps came first: DGC's three seeds ended at 2.153 to 2.158 bits a byte,
outside of dense's 2.130 to 2.148. A GPT of 2 x 64 with 20,000 steps ended .058 above dense (one
seed), one of 2 x 32 with 10,000 steps .10 above.

`--out` is written after every run. Runs that it has are not repeated, so the same command
continues an interrupted table; a file made with other settings is refused.
"""

import argparse
import pathlib
import sys
from collections.abc import Iterator

from benchmarks._lib import platform
from benchmarks._lib.command import Benchmark, Run, at_least, names_of
from benchmarks._lib.report import Report
from benchmarks.convergence._plot import plot
from benchmarks.convergence._tables import tables
from benchmarks.convergence._tasks import TASKS, TRIED, Task, build
from benchmarks.convergence._trainer import METHODS, Trainer

NAME = "convergence.train"


def measure(run: Run) -> None:
    """Do every run that the report lacks."""
    options = run.options
    platform.require_devices(max(METHODS[name].replicas for name in options.methods), NAME)
    tasks = {name: build(name, options.toy, options.steps, options.data) for name in options.tasks}
    describe(run, tasks)
    left = list(lacking(run, tasks))
    for i, (name, method, seeds) in enumerate(left):
        trainer = Trainer(tasks[name], METHODS[method])
        for seed in seeds:
            what = f"{i + 1} of {len(left)}: {name}, {method}, seed {seed}"
            run.status(f"{what}: compiling")
            record = trainer.run(seed, lambda text, what=what: run.status(f"{what}: {text}"))
            runs = run.report["tasks"][name]["runs"]
            runs.setdefault(method, {})[str(seed)] = record
            run.report["tasks"][name]["runs"] = {m: runs[m] for m in METHODS if m in runs}
            run.save()


def describe(run: Run, tasks: dict[str, Task]) -> None:
    """Add a description of each task to the report; refuse runs with other settings."""
    found = run.report.setdefault("tasks", {})
    for name, task in tasks.items():
        old = found.get(name, {}).get("settings", task.settings)
        if differ := [k for k in old | task.settings if old.get(k) != task.settings.get(k)]:
            made, asked = (
                ", ".join(f"{k}={settings.get(k)}" for k in differ)
                for settings in (old, task.settings)
            )
            sys.exit(
                f"{NAME}: --out must have runs of {name} with {asked}, got {run.options.out} with "
                f"{made}. Ask for the same, or write to another file."
            )
        found[name] = {"runs": {}} | found.get(name, {}) | described(name, task)
    run.report["tasks"] = {name: found[name] for name in TASKS if name in found}


def described(name: str, task: Task) -> Report:
    """Return what a reader of the file needs besides the runs."""
    methods = {
        method: {"title": about.title, "replicas": about.replicas}
        for method, about in METHODS.items()
    }
    return {
        "title": task.title,
        "metric": task.metric,
        "higher_is_better": task.higher_is_better,
        "unit": task.unit,
        "settings": task.settings,
        "rates_tried": TRIED[name],
        "methods": methods,
    }


def lacking(run: Run, tasks: dict[str, Task]) -> Iterator[tuple[str, str, list[int]]]:
    """Yield task, method and the seeds that the report does not have yet."""
    for name in tasks:
        for method in run.options.methods:
            done = run.report["tasks"][name]["runs"].get(method, {})
            if seeds := [seed for seed in range(run.options.seeds) if str(seed) not in done]:
                yield name, method, seeds


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add tasks, methods and the number of runs."""
    add = parser.add_argument
    add("--tasks", type=names_of(TASKS), default=list(TASKS), help="default: all")
    add("--methods", type=names_of(METHODS), default=list(METHODS), help="default: all")
    add("--seeds", type=at_least(1), default=3, help="runs of each (default: %(default)s)")
    add("--steps", type=at_least(1), help="steps of a run (default: the task's own)")
    add("--data", type=pathlib.Path, help="CIFAR-10, folder or .tar.gz (default: digits)")


BENCHMARK = Benchmark(
    NAME, __doc__, measure, tables, add_options, keys=("tasks",), plot=plot
)  # fmt: skip
main = BENCHMARK.main

if __name__ == "__main__":
    main()
