"""The first parts of README.md: the example's output, and one table of what jrc saves."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console

from benchmarks._lib.examples import common, train_gpt
from benchmarks._lib.report import has_result, result
from benchmarks._lib.table import Row, Table
from benchmarks._private import memory_text, network_text, seconds_text
from benchmarks.convergence._tables import brief


def example() -> str:
    """Return the table that the first command prints, from the figures of its run."""
    common.console = Console(width=88, color_system=None)
    with common.console.capture() as printed:
        train_gpt.show(result("train_gpt"))
    return f"```\n{printed.get()}```\n"


def headline() -> str:
    """Return a row for each kind of saving: memory, gradient bytes, time on slow links."""
    rows = [*memory_rows(), *byte_rows(), *network_rows()]
    return Table("", ("", "without", "with jrc", "", "price"), rows).markdown()


def memory_rows() -> Iterator[Row]:
    """Yield the peaks of three models with nothing recomputed and with a plan."""
    models = result("plan")["models"]
    for name in ("gpt", "resnet", "linen"):
        model = models[name]
        base, lean = model["baseline"], model["beside"]["quarter"]
        yield (
            f"peak of a gradient: {model['title']}",
            memory_text(base["peak"]),
            memory_text(lean["peak"]),
            f"1/{base['peak'] / lean['peak']:.1f}",
            f"{100 * (lean['flops'] / base['flops'] - 1):.1f} % more FLOPs",
        )


def byte_rows() -> Iterator[Row]:
    """Yield the gradient bytes of both models, dense float32 and compressed."""
    for name, model in result("dgc")["payload"]["models"].items():
        (row,) = (r for r in model["rows"] if r["wire"] == "bf16" and r["all_leaves"])
        dense = 4 * model["parameters"]
        yield (
            f'gradient bytes of a replica and step (`wire="bf16"`, `min_size=0`): {name}',
            network_text(dense),
            network_text(row["payload"]),
            f"1/{dense / row['payload']:,.0f}",
            "u and v: 8 bytes a parameter",
        )


def network_rows() -> Iterator[Row]:
    """Yield DGC beside the faster of the two dense exchanges, JAX's and PyTorch's."""
    found = result("network")
    for name in ("2 processes, 1 Gbit/s", "4 processes, 1 Gbit/s", "4 processes, 100 Mbit/s"):
        run = found["runs"][name]
        dense = min((run[way] for way in ("dense", "ddp") if way in run), key=_seconds)
        whose = "PyTorch DDP" if dense is run.get("ddp") else "JAX"
        yield (
            f"optimizer step, {found['parameters'] / 1e6:.1f} M parameters: {name}",
            f"{seconds_text(dense['seconds'])} ({whose})",
            seconds_text(run["dgc"]["seconds"]),
            f"1/{dense['seconds'] / run['dgc']['seconds']:.1f}",
            "",
        )


def _seconds(way: dict[str, Any]) -> float:
    return way["seconds"]


def trained() -> str:
    """Return where training ends dense and at two densities, on four replicas."""
    return brief(result("convergence")).markdown() if has_result("convergence.json") else ""
