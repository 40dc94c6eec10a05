"""Measure whole optimizer steps on a slow network: dense momentum, DGC and PyTorch.

    python -m benchmarks.network.steps --out benchmarks/results/network.json
    python -m benchmarks.network.steps --processes 2 --links 100 --wire bf16

One process in each of 2 and 4 network namespaces of this machine, joined by links of 1 Gbit/s
and 100 Mbit/s (`tc`), and by links without a limit. A step goes from local gradients, which lie on
the device and differ between processes and steps, to new parameters; there are as many as in a
ResNet-50. Dense is one ring all-reduce of all gradients and `optax.sgd`; DGC is
`jrc.dgc_momentum` at 99.9 %. Where PyTorch is installed, its DistributedDataParallel over gloo
stands beside them, plain and with its PowerSGD hook (rank 1, a compression rate of at least 2,
error feedback, warm start, compressed from the third step on, before any is timed), both with
PyTorch's momentum SGD.

The methods differ in kind. DGC sends the largest 0.1 % of what each large leaf has accumulated, and
keeps the rest for later; PowerSGD sends two thin factors of each matrix, whose product of rank 1
approximates the mean gradient, and keeps the difference for later. Both send small leaves, or
vectors, whole. What either costs in accuracy is not measured here. JAX's processes use the threads
that XLA chooses, as many as there are cores; PyTorch's use one each, with which they were faster
on two cores. PyTorch copies the prepared gradients on their way to DDP's reducer: rows state how
long that takes.

The methods take turns in blocks, the slowest process counts, seconds are medians with quartiles.
Bytes are those that the interfaces count, headers and acknowledgements included, beside those
predicted: by `jrc.dgc_stats`, and for PyTorch by the shapes.

Needs root, `ip` and `tc`; without them it runs on loopback, without a limit. Figures for other
links, processes or options are added to those in `--out`.
"""

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks._lib import platform
from benchmarks._lib.command import Benchmark, Run, at_least, names_of
from benchmarks._lib.report import Report
from benchmarks.network._group import Group
from benchmarks.network._links import Links, Loopback, exit_on_termination
from benchmarks.network._rounds import Groups, alternate, slowest, summary
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
from benchmarks.network._tables import TITLES, tables

PEERS = ("ddp", "powersgd")
# Options of `jrc.dgc_momentum` that the command line passes on.
PASSED_ON = ("selector", "wire", "exchange", "min_size")
TOY = {"processes": [2], "blocks": 2, "steps": 2, "loopback": True}
# DDP arranges its buckets after the first step, and PowerSGD begins with the third.
WARM_UP = 3


def measure(run: Run) -> None:
    """Measure every number of processes on every link."""
    options = run.options
    exit_on_termination()
    loopback = on_loopback(run)
    for method, why in left_out(options.one_leaf, options.platform).items():
        if method in options.methods:
            options.methods.remove(method)
            run.console.print(f"Without {TITLES[method]}: {why}.")
    run.report |= platform.host()
    run.report.setdefault("runs", {})
    run.report["differing"] = []
    for count in options.processes:
        study(links_for(count, loopback), run)
        run.save()


def study(links: Links | Loopback, run: Run) -> None:
    """Measure all rates with one number of processes, into the report."""
    options, report = run.options, run.report
    asked = {name: value for name in PASSED_ON if (value := getattr(options, name)) is not None}
    setup = {"one_leaf": options.one_leaf, "toy": options.toy, "options": asked}
    run.status(f"{links.count} processes: compiling")
    with links, started(links, options, setup) as groups:
        distinct = list(dict.fromkeys(groups.values()))
        for method, group in groups.items():
            slowest(group, method, WARM_UP)
        report |= merged(distinct, "about")
        for mbit in options.links:
            name = row_name(links, mbit, asked | ({"leaves": 1} if options.one_leaf else {}))
            run.status(name)
            links.limit(mbit)
            row = {
                "processes": links.count, "mbit": mbit, "options": asked,
                "loopback": isinstance(links, Loopback), "one_leaf": options.one_leaf,
            }  # fmt: skip
            report["runs"][name] = row | measured(groups, options, mbit)
        digests = [group.ask("digests") for group in distinct]
    report["differing"] += [f"{links.count} processes: {name}" for name in differing(digests)]


def measured(groups: Groups, options: argparse.Namespace, mbit: int | None) -> dict[str, Any]:
    """Return the figures of all methods on links of one rate."""
    distinct = list(dict.fromkeys(groups.values()))
    rate = transferred(distinct[0], mbit, options.toy)
    peers = [groups[method] for method in PEERS if method in groups]
    copies = {"handing_over": max(peers[0].ask("handing_over"))} if peers else {}
    found = alternate(groups, options.blocks, options.steps)
    return {"measured_mbit": rate, **copies, **summary(found, merged(distinct, "predicted"))}


def left_out(one_leaf: bool, platform: str) -> dict[str, str]:
    """Return the methods that cannot be measured here, and why."""
    if why := without_torch(platform):
        return dict.fromkeys(PEERS, why)
    return {"powersgd": "one leaf is no matrix (leave out `--one-leaf`)"} if one_leaf else {}


@contextlib.contextmanager
def started(
    links: Links | Loopback, options: argparse.Namespace, setup: dict[str, Any]
) -> Iterator[Groups]:
    """Start the processes of each method: JAX's, and PyTorch's beside them on the same links."""
    jaxes = [method for method in options.methods if method not in PEERS]
    torches = [method for method in options.methods if method in PEERS]
    with contextlib.ExitStack() as undo:
        group = undo.enter_context(Group(links, setup | {"methods": jaxes}, options.platform))
        found = dict.fromkeys(jaxes, group)
        if torches:
            asked = {"methods": torches, "shapes": group.ask("shapes")[0]}
            beside = Group(links, asked, options.platform, "_torch_worker")
            found |= dict.fromkeys(torches, undo.enter_context(beside))
        yield found


def differing(digests: Sequence[Sequence[dict[str, int]]]) -> list[str]:
    """Return the methods whose parameters differ between processes."""
    return [
        method
        for answers in digests
        for method in answers[0]
        if unequal(answer[method] for answer in answers)
    ]


def problems(report: Report) -> Iterator[str]:
    """Yield the methods whose parameters differ between processes."""
    for name in report["differing"]:
        yield f"parameters differ between processes: {name}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add processes, links, methods and the options of DGC."""
    add = parser.add_argument
    add("--processes", type=_counts, default=[2, 4], help="numbers of processes (default: 2,4)")
    add_links(parser)
    add("--methods", type=names_of(TITLES), default=list(TITLES), help="default: all")
    add("--blocks", type=at_least(1), default=5, help="of each method (default: %(default)s)")
    add("--steps", type=at_least(2), default=8, help="in a block of DGC (default: %(default)s)")
    add("--one-leaf", action="store_true", help="all parameters in one leaf")
    for name in PASSED_ON[:-1]:
        add(f"--{name}", help="of jrc.dgc_momentum")
    add("--min-size", type=at_least(0), help="of jrc.dgc_momentum")


def _counts(text: str) -> list[int]:
    return [at_least(2)(count) for count in text.split(",")]


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse methods without DGC, to which all are compared."""
    if "dgc" not in options.methods:
        parser.error(f"--methods: must have dgc, to which all are compared, got {options.methods}.")
    options.methods = [name for name in TITLES if name in options.methods]


BENCHMARK = Benchmark(
    "network.steps", __doc__, measure, tables, add_options, check_options, toy=TOY,
    keys=("runs",), problems=problems, platform="cpu",
)  # fmt: skip
main = BENCHMARK.main

if __name__ == "__main__":
    main()
