"""The measured parts of benchmarks/README.md: tables and pictures of `benchmarks/results`.

`train_gpt.json` and `train_gpt_dense.json` are the `figures.json` of the example's two runs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks._lib.report import Report, has_result, result
from benchmarks._lib.table import Row, Table, mib
from benchmarks._private import network_text
from benchmarks.convergence import _tables as convergence
from benchmarks.convergence import outer, rates
from benchmarks.device import all as device
from benchmarks.device import kernels
from benchmarks.dgc import _tables as dgc
from benchmarks.memory import (
    _others_tables,
    _plan_tables,
    _zoo_tables,
    planning,
    recompute,
    segments,
)
from benchmarks.network import _tables as network
from benchmarks.network import _training_tables as network_training
from benchmarks.network import published
from benchmarks.pytorch import _seconds_tables as torch_seconds
from benchmarks.pytorch import _tables as pytorch
from benchmarks.targets import largest_batch
from benchmarks.training import together


def part(
    name: str,
    tables: Callable[[Report], Sequence[Table]],
    *pictures: tuple[str, str],
) -> Callable[[], str]:
    """Return a function that makes a part of a page.

    Args:
        name: The file in `benchmarks/results` without `.json`; without the file the part is empty.
        tables: Makes the tables of its report.
        pictures: Files in `benchmarks/results` and their descriptions.

    Returns:
        A function that returns Markdown.
    """

    def markdown() -> str:
        if not has_result(f"{name}.json"):
            return ""
        blocks = [table.markdown() for table in tables(result(name))]
        for file, description in pictures:
            if has_result(file):
                blocks.append(f"![{description}](results/{file})\n")
        return "\n".join(blocks)

    return markdown


def regrets() -> str:
    """Return the regrets of plans for targets."""
    names = ("zoo_h100", "zoo_b200", "zoo_v5e", "zoo_v5p")
    found = [part(name, _zoo_tables.regrets)() for name in names]
    return "\n".join(filter(None, found))


def training() -> str:
    """Return the table of the example's runs, with DGC and dense."""
    found = {
        "DGC, up to 99.9 %": result("train_gpt"),
        "dense momentum SGD": result("train_gpt_dense"),
    }
    first = next(iter(found.values()))
    title = (
        f"The example, {len(first['losses'])} steps on {first['device']}, jax {first['jax']}; loss "
        "in nats per byte of held-out text, peak of the compiled baseline step → "
        f"with a plan of budget {first['settings']['budget']}, bytes per step and replica"
    )
    heads = ("", "held-out loss", "peak", "sent, mean", "sent, last step")
    return Table(title, heads, [_run(name, run) for name, run in found.items()]).markdown()


def _run(name: str, found: Mapping[str, Any]) -> Row:
    plain, lean = (found["memory"][key]["peak"] for key in ("plain", "recomputed"))
    last = found["bytes_sent_last"]
    return (
        name,
        f"{found['held_out_before']:.2f} → {found['held_out_after']:.2f}",
        f"{mib(plain, 1)} → {mib(lean, 1)} MiB",
        network_text(found["bytes_sent_mean"]),
        f"{network_text(last)} (1/{found['bytes_dense'] / last:.0f})",
    )


def on_h100() -> str:
    """Return the tables of what ran on an H100."""
    names = (*device.PARTS, "kernels")
    found = {name: result(f"h100/{name}") for name in names if has_result(f"h100/{name}.json")}
    kernel_report = found.pop("kernels", None)
    tables = device.tables(found)
    tables += kernels.tables(kernel_report) if kernel_report else []
    return "\n".join(table.markdown() for table in tables)


PARTS: Mapping[str, Callable[[], str]] = {
    "training": training,
    "recompute": part("recompute", recompute.tables),
    "segments": part("segments", segments.tables),
    "plan": part("plan", _plan_tables.summary),
    "zoo": part("zoo", _zoo_tables.summary),
    "others": part("others", _others_tables.tables),
    "others_h100": part("others_h100", _others_tables.tables),
    "others_v5e": part("others_v5e", _others_tables.tables),
    "others_v5p": part("others_v5p", _others_tables.tables),
    "zoo_h100": part("zoo_h100", _zoo_tables.summary),
    "zoo_b200": part("zoo_b200", _zoo_tables.summary),
    "zoo_v5e": part("zoo_v5e", _zoo_tables.summary),
    "zoo_v5p": part("zoo_v5p", _zoo_tables.summary),
    "peers": part(
        "peers", pytorch.tables,
        ("peers.png", "Saved bytes against matrix products, PyTorch and jrc"),
    ),
    "torch_seconds": part("torch_seconds", torch_seconds.tables),
    "network": part("network", lambda report: [network.steps_table(report)]),
    "network_training": part("network_training", network_training.tables),
    "network_training_batch4": part("network_training_batch4", network_training.tables),
    "planning": part("planning", planning.tables),
    "published": part("published", published.tables),
    "dgc": part("dgc", dgc.tables),
    "convergence": part(
        "convergence", convergence.tables,
        ("convergence.png",
         "Held-out loss of three tasks against bytes sent, dense momentum SGD and DGC"),
    ),
    "outer": part(
        "outer", outer.tables,
        ("outer.png", "Held-out loss against bytes sent: DGC; AdamW at 3e-3, dense and others"),
        ("outer_time.png", "Held-out loss against modelled time on two links, AdamW at 3e-3"),
    ),
    "outer_wide": part("outer_wide", outer.tables),
    "outer_rates": part("outer_rates", rates.tables),
    "outer_rates_8": part("outer_rates_8", rates.tables),
    "outer_rates_2x64": part("outer_rates_2x64", rates.tables),
    "together": part("together", together.tables),
    "h100": on_h100,
    "targets": part(
        "targets", largest_batch.tables,
        ("targets.png", "Largest batch of each way over that of every block recomputed"),
    ),
}  # fmt: skip
