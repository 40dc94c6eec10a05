"""Dense momentum, DGC and PyTorch on a slow network: whole optimizer steps of several processes.

    python benchmarks/network.py [--toy] [--out benchmarks/results/network.json]

One process in each of 2 and 4 network namespaces of this machine, joined by links of 1 Gbit/s
and 100 Mbit/s (`tc`), and by links without a limit. A step goes from local gradients, which lie on
the device and differ between processes and steps, to new parameters; there are as many as in a
ResNet-50. Dense is one ring all-reduce of all gradients and `optax.sgd`; DGC is
`jrc.dgc_momentum` at 99.9 %. Where PyTorch is installed, its DistributedDataParallel over gloo
stands beside them, as it comes and with its PowerSGD hook (rank 1, a compression rate of 2 at
least, error feedback, warm start, compressed from the third step on, before any is timed), both
with PyTorch's momentum SGD.

They are not of one kind. DGC sends the largest 0.1 % of what each large leaf has accumulated, and
keeps the rest for later; PowerSGD sends two thin factors of each matrix, whose product of rank 1
stands for the mean gradient, and keeps the difference for later. Small leaves, or vectors, both
send whole. What either costs in accuracy is not measured here. JAX's processes take the threads
that XLA wants, as many as there are cores; PyTorch's have one each, with which they were quicker
on two cores. PyTorch's copy the prepared gradients on their way to DDP's reducer: rows say how
long that takes.

All take turns in blocks, the slowest process counts, seconds are medians with quartiles. Bytes are
those that the interfaces count, headers and acknowledgements included, beside those predicted: by
`jrc.dgc_stats`, and for PyTorch by the shapes.

Needs root, `ip` and `tc`; without them it says so and runs on loopback, with no limit. Figures for
other links, processes or options are added to those in `--out`.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks._lib.report import opened
from benchmarks.network._group import Group
from benchmarks.network._links import Links, Loopback, exit_on_termination, why_not
from benchmarks.network._tables import MB, TITLES, show

METHODS = tuple(TITLES)
PEERS = ("ddp", "powersgd")
PASSED_ON = ("selector", "wire", "exchange", "min_size")
# DDP arranges its buckets after the first step, and PowerSGD begins with the third.
WARM_UP = 3
# A tenth of a second on the wire at least, and no more than some seconds.
TRANSFER_SECONDS, TRANSFER_LEAST = 2, 40 * MB
Groups = Mapping[str, Group]


def left_out(one_leaf: bool, platform: str) -> dict[str, str]:
    """Methods that cannot be measured here, and why, with the way out."""
    if importlib.util.find_spec("torch") is None:
        return dict.fromkeys(PEERS, "there is no PyTorch here (`pip install torch`)")
    if platform != "cpu":
        return dict.fromkeys(PEERS, "PyTorch's processes compute on CPU (`--platform cpu`)")
    return {"powersgd": "one leaf is no matrix (leave out `--one-leaf`)"} if one_leaf else {}


@contextlib.contextmanager
def started(
    links: Links | Loopback, options: argparse.Namespace, setup: dict[str, Any]
) -> Iterator[Groups]:
    """The processes of each method: JAX's, and PyTorch's beside them on the same links."""
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


def alternate(groups: Groups, blocks: int, steps: int) -> dict[str, Any]:
    """Seconds and bytes of all methods, block by block in turns.

    Args:
        groups: The processes of each method, which have taken steps before.
        blocks: Blocks of each method.
        steps: Steps in a block of DGC; a block of slower steps takes about as long.

    Returns:
        For each method the seconds of every block's steps, of the slowest process each, and the
        bytes that one process sends in a step, `None` where no interface counts them.
    """
    first = {method: _seconds(group, method, 1)[0] for method, group in groups.items()}
    fitting = {method: round(steps * first["dgc"] / first[method]) for method in groups}
    counts = {method: min(max(count, 1), steps) for method, count in fitting.items()}
    found: dict[str, Any] = {method: {"blocks": [], "sent": []} for method in groups}
    for _ in range(blocks):
        for method, group in groups.items():
            before = group.ask("counters")
            found[method]["blocks"].append(_seconds(group, method, counts[method]))
            sent = sent_a_step(before, group.ask("counters"), counts[method])
            found[method]["sent"].append(sent)
    return found


def _seconds(group: Group, method: str, count: int) -> list[float]:
    """Of each step, those of the slowest process."""
    return [max(step) for step in zip(*group.ask("steps", method=method, count=count), strict=True)]


def sent_a_step(before: Sequence[Any], after: Sequence[Any], steps: int) -> float | None:
    """Bytes that a process sent on average, from the counters of all interfaces."""
    if None in before:
        return None
    total = sum(now["sent"] - then["sent"] for then, now in zip(before, after, strict=True))
    return total / len(before) / steps


def summary(found: dict[str, Any], predicted: dict[str, float]) -> dict[str, Any]:
    """Medians and quartiles, and ratios to DGC, also of each pair of blocks; dense's by itself."""
    row: dict[str, Any] = {}
    for method, measured in found.items():
        seconds = [step for block in measured["blocks"] for step in block]
        low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
        sent = measured["sent"]
        row[method] = {
            "seconds": middle,
            "least": min(seconds),
            "quartiles": [low, high],
            "steps": len(seconds),
            "bytes_sent": None if None in sent else statistics.median(sent),
            "bytes_predicted": predicted[method],
        }
    middles = {
        method: [statistics.median(block) for block in measured["blocks"]]
        for method, measured in found.items()
    }
    for method in (method for method in found if method != "dgc"):
        pairs = zip(middles[method], middles["dgc"], strict=True)
        at = row if method == "dense" else row[method]
        at["ratio"] = row[method]["seconds"] / row["dgc"]["seconds"]
        at["ratios"] = sorted(theirs / dgc for theirs, dgc in pairs)
    return row


def study(
    links: Links | Loopback, options: argparse.Namespace, report: dict[str, Any], progress: Progress
) -> list[str]:
    """All rates with one number of processes, into the report; returns what went wrong."""
    asked = {name: value for name in PASSED_ON if (value := getattr(options, name)) is not None}
    setup = {"one_leaf": options.one_leaf, "toy": options.toy, "options": asked}
    task = progress.add_task("", total=1 + len(options.links))
    say = f"{links.count} processes: "
    progress.update(task, description=say + "compiling")
    with links, started(links, options, setup) as groups:
        distinct = list(dict.fromkeys(groups.values()))
        for method, group in groups.items():
            _seconds(group, method, WARM_UP)
        report |= _merged(distinct, "about")
        peers = [groups[method] for method in PEERS if method in groups]
        handed = {"handing_over": max(peers[0].ask("handing_over"))} if peers else {}
        for mbit in options.links:
            name = row_name(links, mbit, asked | ({"leaves": 1} if options.one_leaf else {}))
            progress.update(task, description=say + name, advance=1)
            links.limit(mbit)
            nbytes = max(TRANSFER_LEAST, (mbit or 0) * MB // 8 * TRANSFER_SECONDS)
            measured = distinct[0].transfer(MB if options.toy else nbytes)
            found = alternate(groups, options.blocks, options.steps)
            report["runs"][name] = {
                "processes": links.count, "mbit": mbit, "loopback": isinstance(links, Loopback),
                "options": asked, "one_leaf": options.one_leaf, "measured_mbit": measured,
                **handed, **summary(found, _merged(distinct, "predicted")),
            }  # fmt: skip
        progress.update(task, advance=1)
        digests = [group.ask("digests") for group in distinct]
    return [f"{say}parameters of {method} differ" for method in differing(digests)]


def _merged(groups: Sequence[Group], request: str) -> dict[str, Any]:
    """What the first process of each group answers."""
    return {name: at for group in groups for name, at in group.ask(request)[0].items()}


def differing(digests: Sequence[Sequence[dict[str, int]]]) -> list[str]:
    """Methods whose parameters are not the same on all processes, of each group's answers."""
    return [
        method
        for answers in digests
        for method in answers[0]
        if len({answer[method] for answer in answers}) > 1
    ]


def row_name(links: Links | Loopback, mbit: int | None, settings: dict[str, Any]) -> str:
    """What a row is called in results, with all that is not the default."""
    rate = "loopback" if isinstance(links, Loopback) else rate_name(mbit)
    said = (f", {name.replace('_', ' ')} {value}" for name, value in settings.items())
    return f"{links.count} processes, {rate}" + "".join(said)


def rate_name(mbit: int | None) -> str:
    if mbit is None:
        return "no limit"
    return f"{mbit // 1000} Gbit/s" if mbit % 1000 == 0 else f"{mbit} Mbit/s"


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--processes", default="2,4", help="numbers of processes (default: %(default)s)")
    add("--links", default="unlimited,1000,100", help="Mbit/s (default: %(default)s)")
    add("--methods", default=",".join(METHODS), help="dgc, and others (default: %(default)s)")
    add("--blocks", type=int, default=5, help="of each method (default: %(default)s)")
    add("--steps", type=int, default=8, help="in a block of DGC (default: %(default)s)")
    add("--one-leaf", action="store_true", help="all parameters in one leaf")
    for name in PASSED_ON[:-1]:
        add(f"--{name}", help="of jrc.dgc_momentum")
    add("--min-size", type=int, help="of jrc.dgc_momentum")
    add("--loopback", action="store_true", help="without namespaces, even where there is root")
    add("--toy", action="store_true", help="tiny, on loopback, to see that it runs")
    add("--platform", default="cpu", help="cpu, gpu or tpu (default: %(default)s)")
    add("--out", type=pathlib.Path, help="JSON file to read and write")
    options = parser.parse_args(argv)
    options.methods = options.methods.split(",")
    others = [name for name in METHODS if name != "dgc"]
    if sorted(set(options.methods) - set(others)) != ["dgc"]:
        said = f"dgc, which all is compared with, and any of {', '.join(others)}"
        parser.error(f"--methods: {said}; got {', '.join(options.methods)}")
    options.methods = [name for name in METHODS if name in options.methods]
    try:
        options.processes = [int(count) for count in options.processes.split(",")]
        rates = options.links.split(",")
        options.links = [None if rate == "unlimited" else int(rate) for rate in rates]
    except ValueError as error:
        parser.error(f"--processes, --links: numbers, or `unlimited` for a link; {error}")
    if min(options.processes) < 2 or options.blocks < 1 or options.steps < 2:
        parser.error("--processes, --steps: 2 at least; --blocks: 1 at least")
    if options.toy:
        options.processes, options.blocks, options.steps = [2], 2, 2
    return options


def main(argv: list[str] | None = None) -> dict[str, Any]:
    options = arguments(argv)
    exit_on_termination()
    console, said = Console(), []
    asked_for = options.toy or options.loopback
    reason = "asked for" if asked_for else why_not()
    if reason:
        options.links = [None]
        console.print(f"On loopback, without any limit: {reason}.")
    for method, why in left_out(options.one_leaf, options.platform).items():
        if method in options.methods:
            options.methods.remove(method)
            console.print(f"Without {TITLES[method]}: {why}.")
    old = opened(options.out, "network.py", "runs")
    here = {"toy": options.toy, "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    report = old | here | {"runs": old.get("runs", {})}
    with Progress(console=console) as progress:
        for count in options.processes:
            links = Loopback(count) if reason else Links(count)
            said += study(links, options, report, progress)
            if options.out:
                options.out.write_text(json.dumps(report, indent=1) + "\n")
    show(console, report)
    for line in said:
        console.print(f"[red]broken:[/red] {line}")
    if said:
        sys.exit(1)
    return report


if __name__ == "__main__":
    main()
