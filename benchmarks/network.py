"""Dense momentum beside DGC on a slow network: whole optimizer steps of several processes.

    python benchmarks/network.py [--toy] [--out benchmarks/results/network.json]

One JAX process in each of 2 and 4 network namespaces of this machine, joined by links of 1 Gbit/s
and 100 Mbit/s (`tc`), and by links without a limit. A step goes from local gradients, which lie on
the device and differ between processes and steps, to new parameters; there are as many as in a
ResNet-50. Dense is one ring all-reduce of all gradients and `optax.sgd`; DGC is
`jrc.dgc_momentum` at 99.9 %. The two take turns in blocks, the slowest process counts, seconds are
medians with quartiles. Bytes are those that the interfaces count, headers and acknowledgements
included, beside those that `jrc.dgc_stats` predicts.

Needs root, `ip` and `tc`; without them it says so and runs on loopback, with no limit. Figures for
other links, processes or options are added to those in `--out`.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from network_group import Group
from network_links import Links, Loopback, exit_on_termination, why_not
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

METHODS = ("dense", "dgc")
PASSED_ON = ("selector", "wire", "exchange", "min_size")
MB = 10**6
# A tenth of a second on the wire at least, and no more than some seconds.
TRANSFER_SECONDS, TRANSFER_LEAST = 2, 40 * MB


def alternate(group: Group, blocks: int, steps: int) -> dict[str, Any]:
    """Seconds and bytes of both methods, block by block in turns.

    Args:
        group: The processes, both methods compiled.
        blocks: Blocks of each method.
        steps: Steps in a block of DGC; a block of dense steps takes about as long.

    Returns:
        For each method the seconds of every block's steps, of the slowest process each, and the
        bytes that one process sends in a step, `None` where no interface counts them.
    """
    first = {method: _seconds(group, method, 1)[0] for method in METHODS}
    fitting = round(steps * first["dgc"] / first["dense"])
    counts = {"dense": min(max(fitting, 1), steps), "dgc": steps}
    found: dict[str, Any] = {method: {"blocks": [], "sent": []} for method in METHODS}
    for _ in range(blocks):
        for method in METHODS:
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
    """Medians, quartiles and the ratio of dense to DGC; of the ratio also each pair of blocks."""
    row: dict[str, Any] = {}
    for method in METHODS:
        seconds = [step for block in found[method]["blocks"] for step in block]
        low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
        sent = found[method]["sent"]
        row[method] = {
            "seconds": middle,
            "least": min(seconds),
            "quartiles": [low, high],
            "steps": len(seconds),
            "bytes_sent": None if None in sent else statistics.median(sent),
            "bytes_predicted": predicted[method],
        }
    middles = [
        [statistics.median(block) for block in found[method]["blocks"]] for method in METHODS
    ]
    row["ratio"] = row["dense"]["seconds"] / row["dgc"]["seconds"]
    row["ratios"] = sorted(dense / dgc for dense, dgc in zip(*middles, strict=True))
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
    with links, Group(links, setup, options.platform) as group:
        report |= group.ask("about")[0]
        for method in METHODS:
            _seconds(group, method, 2)
        for mbit in options.links:
            name = row_name(links, mbit, asked | ({"leaves": 1} if options.one_leaf else {}))
            progress.update(task, description=say + name, advance=1)
            links.limit(mbit)
            nbytes = max(TRANSFER_LEAST, (mbit or 0) * MB // 8 * TRANSFER_SECONDS)
            measured = group.transfer(MB if options.toy else nbytes)
            found = alternate(group, options.blocks, options.steps)
            report["runs"][name] = {
                "processes": links.count, "mbit": mbit, "loopback": isinstance(links, Loopback),
                "options": asked, "one_leaf": options.one_leaf, "measured_mbit": measured,
                **summary(found, group.ask("predicted")[0]),
            }  # fmt: skip
        progress.update(task, advance=1)
        digests = group.ask("digests")
    return [] if len({str(each) for each in digests}) == 1 else [f"{say}parameters differ"]


def row_name(links: Links | Loopback, mbit: int | None, settings: dict[str, Any]) -> str:
    """What a row is called in results, with all that is not the default."""
    rate = "loopback" if isinstance(links, Loopback) else rate_name(mbit)
    said = (f", {name.replace('_', ' ')} {value}" for name, value in settings.items())
    return f"{links.count} processes, {rate}" + "".join(said)


def rate_name(mbit: int | None) -> str:
    if mbit is None:
        return "no limit"
    return f"{mbit // 1000} Gbit/s" if mbit % 1000 == 0 else f"{mbit} Mbit/s"


def show(console: Console, report: dict[str, Any]) -> None:
    size = f"{report['parameters']:,} parameters in {report['leaves']} leaves"
    times = _table(f"{size}: medians ± half of what lies between the quartiles")
    for head in ("Mbit/s", "dense, s", "DGC, s", "ratio", "of blocks"):
        times.add_column(head, justify="right", no_wrap=True)
    sent = _table("MB that a process sends in a step: counted at its interface, and predicted")
    for head in ("dense", "predicted", "DGC", "predicted"):
        sent.add_column(head, justify="right", no_wrap=True)
    for name, row in report["runs"].items():
        times.add_row(
            name,
            f"{min(row['measured_mbit']):,.0f}",
            *(_seconds_cell(row[method]) for method in METHODS),
            f"{row['ratio']:.1f} x",
            f"{row['ratios'][0]:.1f}-{row['ratios'][-1]:.1f}",
        )
        sent.add_row(name, *(cell for method in METHODS for cell in _bytes_cells(row[method])))
    console.print(times)
    console.print(sent)


def _table(title: str) -> Table:
    table = Table(title=title)
    table.add_column("")
    return table


def _seconds_cell(row: dict[str, Any]) -> str:
    low, high = row["quartiles"]
    return f"{row['seconds']:.3f} ±{(high - low) / 2:.3f}"


def _bytes_cells(row: dict[str, Any]) -> tuple[str, str]:
    counted = "-" if row["bytes_sent"] is None else f"{row['bytes_sent'] / MB:,.3f}"
    return counted, f"{row['bytes_predicted'] / MB:,.3f}"


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--processes", default="2,4", help="numbers of processes (default: %(default)s)")
    add("--links", default="unlimited,1000,100", help="Mbit/s (default: %(default)s)")
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
    old = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    report = {"toy": options.toy, "cores": os.cpu_count(), "runs": old.get("runs", {})}
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
