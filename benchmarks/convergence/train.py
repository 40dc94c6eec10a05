"""Where training ends: deep gradient compression at 99.9 % beside dense momentum SGD.

    python benchmarks/convergence.py [--toy] [--tasks digits,gpt,lstm] [--seeds 3]
                                     [--out benchmarks/results/convergence.json] [--plot DIR]

Three tasks: a ResNet-20 on scikit-learn's digits (`--data PATH`: CIFAR-10), a byte-level GPT and a
byte-level LSTM on the standard library's source. Each is trained by dense momentum SGD and by DGC
on 4 and 8 replicas, by DGC on 4 without each of momentum correction, factor masking, local clipping
and warm-up, by DGC on 4 that goes no further than 99 %, with factor masking and without, and dense
on 4 without clipping, to see what that is worth where nothing is compressed. Everything runs
through `jrc.make_train_step`; on a CPU replicas are virtual.

All methods have the same parameters, batches, rate, momentum and bound C of the gradient: dense
clips the mean gradient's norm to C, DGC each tensor's local one to C sqrt(N). The whole batch does
not depend on the number of replicas. The rate was chosen for dense alone among those in
`convergence_tasks.TRIED`; it rises for a twentieth of the steps and falls as a cosine. DGC
passes through five levels of sparsity in a tenth of the steps, and leaves tensors below `min_size`
dense.

How many steps there are matters: at 99.9 % on four replicas four entries in a thousand move in a
step, so an entry waits for 250 steps on average, at 99 % for 25. The tasks are as small, and runs
as long, as lets the whole table be made on a few cores in about three hours; the paper's shortest
run has some ten thousand steps.

Sizes and numbers of steps, unlike the rate, were chosen after trials in which DGC was seen too. An
LSTM of 2 x 128 with 8,000 steps came first: DGC's three seeds ended at 2.153 to 2.158 bits a byte,
outside of dense's 2.130 to 2.148. A GPT of 2 x 64 with 20,000 steps ended .058 above dense (one
seed), one of 2 x 32 with 10,000 steps .10 above.

`--out` is written after every run. Runs that it holds are not done again, so an interrupted table
goes on with the same command; a file made with other settings is refused.
"""

import argparse
import pathlib
import sys
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks._lib import platform as machine
from benchmarks._lib.examples import write_json
from benchmarks._lib.report import opened as report_of
from benchmarks.convergence._plot import plot
from benchmarks.convergence._tables import show
from benchmarks.convergence._tasks import TASKS, TRIED, Task, build
from benchmarks.convergence._trainer import METHODS, Trainer

Report = dict[str, Any]


def opened(path: pathlib.Path | None, tasks: dict[str, Task]) -> Report:
    """The report so far, with a place for each task."""
    found = report_of(path, "convergence.py", "tasks") or {"tasks": {}}
    for name, task in tasks.items():
        old = found["tasks"].get(name, {}).get("settings", task.settings)
        if differ := [k for k in old | task.settings if old.get(k) != task.settings.get(k)]:
            made, asked = (
                ", ".join(f"{k}={settings.get(k)}" for k in differ)
                for settings in (old, task.settings)
            )
            sys.exit(
                f"convergence.py: {path} holds runs of {name} with {made}; asked for are {asked}. "
                "Ask for the same, or write to another --out."
            )
        found["tasks"].setdefault(name, {"runs": {}})
        found["tasks"][name] |= described(name, task)
    found["tasks"] = {name: found["tasks"][name] for name in TASKS if name in found["tasks"]}
    return found


def described(name: str, task: Task) -> Report:
    """What a reader of the file needs besides the runs."""
    words = {
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
        "methods": words,
    }


def study(
    tasks: dict[str, Task], report: Report, options: argparse.Namespace, progress: Progress
) -> None:
    """Every run that the report lacks, into the report and its file."""
    left = [
        (name, method, _lacking(report, name, method, options.seeds))
        for name in tasks
        for method in options.methods
    ]
    bar = progress.add_task("", total=sum(len(seeds) for *_, seeds in left))
    for name, method, seeds in left:
        trainer = Trainer(tasks[name], METHODS[method]) if seeds else None
        for seed in seeds:
            what = f"{name}, {method}, seed {seed}"
            progress.update(bar, description=f"{what}: compiling")
            record = trainer.run(seed, _teller(progress, bar, what, tasks[name]))
            runs = report["tasks"][name]["runs"]
            runs.setdefault(method, {})[str(seed)] = record
            report["tasks"][name]["runs"] = {m: runs[m] for m in METHODS if m in runs}
            if options.out:
                write_json(options.out, report)
            progress.update(bar, advance=1)


def _lacking(report: Report, name: str, method: str, seeds: int) -> list[int]:
    done = report["tasks"][name]["runs"].get(method, {})
    return [seed for seed in range(seeds) if str(seed) not in done]


def _teller(progress: Progress, bar: Any, what: str, task: Task) -> Any:
    def told(step: int, loss: float) -> None:
        said = f"{what}: step {step:,} of {task.settings['steps']:,}, {loss:.3f} {task.unit}"
        progress.update(bar, description=said)

    return told


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--tasks", default=",".join(TASKS), help="default: %(default)s")
    add("--methods", default=",".join(METHODS), help="default: %(default)s")
    add("--seeds", type=int, default=3, help="runs of each (default: %(default)s)")
    add("--steps", type=int, help="steps of a run (default: the task's own)")
    add("--toy", action="store_true", help="tiny, to see that it runs")
    machine.add_platform(parser)
    add("--data", type=pathlib.Path, help="CIFAR-10, folder or .tar.gz (default: digits)")
    add("--out", type=pathlib.Path, help="JSON file to go on with and to write")
    add("--plot", type=pathlib.Path, help="folder for convergence.png")
    options = parser.parse_args(argv)
    for name, known in (("tasks", TASKS), ("methods", METHODS)):
        asked = getattr(options, name).split(",")
        if unknown := [each for each in asked if each not in known]:
            parser.error(f"--{name}: there are {', '.join(known)}; got {', '.join(unknown)}")
        setattr(options, name, asked)
    if options.seeds < 1 or (options.steps is not None and options.steps < 1):
        parser.error("--seeds and --steps: 1 at least")
    return options


def start(options: argparse.Namespace) -> None:
    """As many devices as the largest method needs, virtual ones on a CPU."""
    needed = max(METHODS[name].replicas for name in options.methods)
    machine.use(options.platform)
    # Asked for before JAX starts.
    if jax.config.jax_num_cpu_devices < needed:
        jax.config.update("jax_num_cpu_devices", needed)
    if (found := len(jax.devices())) < needed:
        sys.exit(
            f"convergence.py: {needed} replicas need as many devices; there are {found}. Choose "
            "--methods with fewer replicas, or --platform cpu, where devices are virtual."
        )


def main(argv: list[str] | None = None) -> Report:
    options = arguments(argv)
    start(options)
    console = Console()
    tasks = {name: build(name, options.toy, options.steps, options.data) for name in options.tasks}
    report = opened(options.out, tasks)
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
            study(tasks, report, options, progress)
    except KeyboardInterrupt:
        kept = f"{options.out} holds what is done" if options.out else "without --out all is lost"
        console.print(f"\nStopped; {kept}. The same command goes on.")
        raise SystemExit(130) from None
    show(console, report)
    if options.plot and (path := plot(report, options.plot)):
        console.print(f"Written: {path}")
    return report


if __name__ == "__main__":
    main()
