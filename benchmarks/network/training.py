"""Measure training steps over slow links: AdamW dense, DiLoCo, SparseLoCo, DGC and PyTorch.

    python -m benchmarks.network.training --out benchmarks/results/network_training.json
    python -m benchmarks.network.training --links 100 --methods adamw,sparseloco_30

One process in each of 4 network namespaces of this machine, joined by links without a limit, of 1
Gbit/s and of 100 Mbit/s (`tc`). Each trains the same GPT of 25 M parameters on a small batch of its
own: forward, backward, clipping, optimizer. jrc trains by AdamW with dense gradients, DiLoCo,
SparseLoCo, and DGC with momentum SGD; where PyTorch is installed, DistributedDataParallel over gloo
trains a GPT of the same products by AdamW, plain and with its PowerSGD hook. What any of these
costs in loss is measured in `convergence.outer`, not here.

The methods take turns in blocks of whole rounds. A method's seconds are the mean over its blocks,
of the slowest process. What computes is measured in the same turns, at their beginning and at their
end: the same step without any exchange, by as many processes at a time. Its seconds over those of a
method are the method's utilisation; what a method computes besides, such as a compression, counts
as exchange. All processes share this machine's cores, so that the seconds of computation are those
of a small part of a machine, and steps of faster machines wait for a larger share.

Bytes are those that the interfaces count, headers and acknowledgements included, beside those that
jrc predicts (`info.bytes_sent`), and for PyTorch those of a ring. After each block the parameters
that processes share must be equal, bit for bit.

Needs root, `ip` and `tc`; without them it runs on loopback, without a limit. A baseline is measured
with every method. Figures are written after each link, and what `--out` has of other links and
methods is kept. Compilation takes minutes. With JAX_COMPILATION_CACHE_DIR set, and `--compile` once
before, it takes less, and the measurement begins sooner.
"""

import argparse
import contextlib
import math
import statistics
import sys
from collections.abc import Iterable, Iterator

from benchmarks._lib import platform
from benchmarks._lib.command import Benchmark, Run, at_least, names_of
from benchmarks._lib.report import Report
from benchmarks.network._group import Group
from benchmarks.network._links import Links, Loopback, exit_on_termination
from benchmarks.network._rounds import Groups, sent_a_step
from benchmarks.network._rows import (
    add_links,
    links_for,
    merged,
    on_loopback,
    row_name,
    transferred,
    unequal,
    without_torch,
)
from benchmarks.network._training_methods import (
    METHODS,
    MODEL,
    TOY_MODEL,
    exchanges,
    with_baselines,
)
from benchmarks.network._training_tables import tables

NAME = "network.training"
TOY = {"processes": 2, "blocks": 1, "steps": 2, "loopback": True}


def measure(run: Run) -> None:
    """Measure all methods on every link."""
    options, report = run.options, run.report
    model = TOY_MODEL if options.toy else MODEL | {"batch": options.batch}
    if report.setdefault("model", model) != model:
        sys.exit(
            f"{NAME}: --out must have figures of the same model, {model}, got {report['model']} in "
            f"{options.out}. Write to another file."
        )
    exit_on_termination()
    loopback = on_loopback(run)
    methods = options.methods
    torches = [name for name in methods if METHODS[name].torch]
    if torches and (why := without_torch(options.platform)):
        methods = [name for name in methods if name not in torches]
        run.console.print(f"Without PyTorch: {why}.")
    if not methods:
        sys.exit(f"{NAME}: --methods must have one that can be measured here, got only PyTorch's.")
    report |= platform.host()
    report.setdefault("runs", {})
    report["broken"] = []
    with links_for(options.processes, loopback) as links, started(links, run, methods) as groups:
        for name, group in groups.items():
            run.status(f"{links.count} processes: compiling {name}")
            group.ask("warm_up", method=name)
            run.console.print(f"{METHODS[name].title}: ready.")
        report |= merged(list(dict.fromkeys(groups.values())), "about")
        for mbit in () if options.compile else options.links:
            links.limit(mbit)
            measure_link(links, mbit, groups, run)
            run.save()


def measure_link(links: Links | Loopback, mbit: int | None, groups: Groups, run: Run) -> None:
    """Add a link's figures to the report; those of methods that were left out stay."""
    options, name = run.options, row_name(links, mbit, {})
    any_group = next(iter(groups.values()))
    row = {"processes": links.count, "mbit": mbit, "loopback": isinstance(links, Loopback)}
    row["measured_mbit"] = transferred(any_group, mbit, options.toy)
    blocks: dict[str, list[Report]] = {method: [] for method in groups}
    for number in range(options.blocks):
        for method in in_turn(groups):
            run.status(f"{name}, block {number + 1} of {options.blocks}: {METHODS[method].title}")
            blocks[method].append(block(groups[method], method, steps_of(method, options)))
    run.report["broken"] += list(broken(name, blocks))
    kept = run.report["runs"].get(name, {}).get("methods", {})
    found = summary(blocks)
    row["methods"] = {each: at for each in METHODS if (at := found.get(each) or kept.get(each))}
    run.report["runs"] = dict(sorted((run.report["runs"] | {name: row}).items(), key=_in_order))


def in_turn(names: Iterable[str]) -> list[str]:
    """Return the methods of a turn: the baselines once more at its end, because machines drift."""
    names = list(names)
    return [*names, *(name for name in names if not exchanges(name))]


def _in_order(item: tuple[str, Report]) -> tuple[int, float]:
    """Sort rows by processes, then by rate, the fastest first."""
    row = item[1]
    return row["processes"], -(row["mbit"] or math.inf)


def steps_of(method: str, options: argparse.Namespace) -> int:
    """Return the steps of a block: whole rounds; twice as many of what others are compared with."""
    if METHODS[method].outer:
        return METHODS[method].every * options.rounds
    return options.steps if exchanges(method) else 2 * options.steps


def block(group: Group, method: str, steps: int) -> Report:
    """Take steps in all processes; return the mean seconds of one in each, and its bytes."""
    group.ask("begin", method=method)
    before = group.ask("counters")
    taken = group.ask("steps", method=method, count=steps)
    sent = sent_a_step(before, group.ask("counters"), steps)
    ended = group.ask("end", method=method)
    return {
        "steps": steps,
        "seconds": [math.fsum(each) / steps for each in taken],
        "sent": sent,
        **{key: [each[key] for each in ended] for key in ("digest", "bytes", "loss")},
    }


def broken(name: str, blocks: dict[str, list[Report]]) -> Iterator[str]:
    """Yield which methods have unequal parameters, or losses that are not finite."""
    for method, each in blocks.items():
        if any(unequal(at["digest"]) for at in each):
            yield f"{name}: parameters of {method} differ between processes"
        if not all(math.isfinite(loss) for at in each for loss in at["loss"]):
            yield f"{name}: a loss of {method} is not finite"


def summary(blocks: dict[str, list[Report]]) -> dict[str, Report]:
    """Return mean seconds, utilisation and bytes of each method."""
    slowest = {name: [max(at["seconds"]) for at in each] for name, each in blocks.items()}
    found = {}
    for name, each in blocks.items():
        seconds = statistics.fmean(slowest[name])
        sent = [at["sent"] for at in each]
        found[name] = {
            "seconds": seconds,
            "blocks": slowest[name],
            "steps": each[0]["steps"],
            "utilisation": statistics.fmean(slowest[METHODS[name].baseline]) / seconds,
            "bytes_sent": None if None in sent else statistics.fmean(sent),
            "bytes_predicted": statistics.fmean(b for at in each for b in at["bytes"]),
            "loss": statistics.fmean(each[-1]["loss"]),
        }
    return found


@contextlib.contextmanager
def started(links: Links | Loopback, run: Run, methods: list[str]) -> Iterator[Groups]:
    """Start the processes of each method: JAX's, and PyTorch's beside them on the same links."""
    setup = {"model": run.report["model"]}
    torches = [name for name in methods if METHODS[name].torch]
    jaxes = [name for name in methods if name not in torches]
    with contextlib.ExitStack() as undo:
        # PyTorch's processes need the shapes from JAX's, even if these train nothing.
        asked = Group(links, setup | {"methods": jaxes}, run.options.platform, "_jax_training")
        group = undo.enter_context(asked)
        found = dict.fromkeys(jaxes, group)
        if torches:
            setup |= {"methods": torches, "leaves": group.ask("leaves")[0]}
            beside = Group(links, setup, run.options.platform, "_torch_training")
            found |= dict.fromkeys(torches, undo.enter_context(beside))
        yield {name: found[name] for name in methods}


def problems(report: Report) -> Iterator[str]:
    """Yield what the last run broke."""
    yield from report["broken"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add processes, links, methods and the lengths of blocks."""
    add = parser.add_argument
    add("--processes", type=at_least(2), default=4, help="(default: %(default)s)")
    add_links(parser)
    add("--methods", type=names_of(METHODS), default=list(METHODS), help="default: all")
    add("--batch", type=at_least(1), default=MODEL["batch"],
        help="sequences of a process in a step (default: %(default)s)")  # fmt: skip
    add("--blocks", type=at_least(1), default=1, help="of each method (default: %(default)s)")
    add("--rounds", type=at_least(1), default=1, help="in a block of a method that has them")
    add("--compile", action="store_true",
        help="measure nothing, but fill JAX_COMPILATION_CACHE_DIR")  # fmt: skip
    add("--steps", type=at_least(1), default=3, help="in a block of another (default: %(default)s)")


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Add the baselines."""
    del parser
    options.methods = with_baselines(options.methods)


BENCHMARK = Benchmark(
    NAME, __doc__, measure, tables, add_options, check_options, toy=TOY, keys=("runs",),
    problems=problems, platform="cpu",
)  # fmt: skip
main = BENCHMARK.main

if __name__ == "__main__":
    main()
