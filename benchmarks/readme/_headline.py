"""What a newcomer reads first: what the example prints, and one table of what jrc is worth."""

from rich.console import Console

from benchmarks._lib.examples import common, train_gpt
from benchmarks.convergence._tables import brief
from benchmarks.readme._tables import load, measured, table


def example() -> str:
    """The table that ends the first command, from the figures of its run."""
    common.console = Console(width=88, color_system=None)
    with common.console.capture() as said:
        train_gpt.show(load("train_gpt"))
    return f"```\n{said.get()}```\n"


def headline() -> str:
    """A row for each thing that runs out."""
    return table(
        ("", "without", "with jrc", "", "price"),
        *memory_rows(),
        *byte_rows(),
        *network_rows(),
    )


def memory_rows():
    models = load("plan")["models"]
    for name in ("gpt", "resnet", "linen"):
        model = models[name]
        base, lean = model["baseline"], model["beside"]["quarter"]
        yield (
            f"peak of a gradient: {model['title']}",
            f"{base['peak'] / 2**20:,.0f} MiB",
            f"{lean['peak'] / 2**20:,.0f} MiB",
            f"1/{base['peak'] / lean['peak']:.1f}",
            f"{100 * (lean['flops'] / base['flops'] - 1):.1f} % more FLOPs",
        )


def byte_rows():
    for name, model in load("dgc")["payload"]["models"].items():
        (row,) = (r for r in model["rows"] if r["wire"] == "bf16" and r["all_leaves"])
        dense = 4 * model["parameters"]
        yield (
            f"gradient bytes of a replica and step: {name}",
            f"{dense / 1e6:,.1f} MB",
            f"{row['payload'] / 1e3:,.1f} kB",
            f"1/{dense / row['payload']:,.0f}",
            "u and v: 8 bytes a parameter",
        )


def network_rows():
    """DGC beside the faster of the two dense exchanges, JAX's and PyTorch's."""
    found = load("network")
    for name in ("2 processes, 1 Gbit/s", "4 processes, 1 Gbit/s", "4 processes, 100 Mbit/s"):
        run = found["runs"][name]
        dense = min((run[way] for way in ("dense", "ddp") if way in run), key=_seconds)
        whose = "PyTorch DDP" if dense is run.get("ddp") else "JAX"
        yield (
            f"optimizer step, {found['parameters'] / 1e6:.1f} M parameters: {name}",
            f"{dense['seconds']:,.2f} s ({whose})",
            f"{run['dgc']['seconds']:,.2f} s",
            f"1/{dense['seconds'] / run['dgc']['seconds']:.1f}",
            "",
        )


def _seconds(way):
    return way["seconds"]


def trained() -> str:
    """Where training ends without compression and with two grades of it, on four replicas."""
    return table(*brief(load("convergence"))) if measured("convergence") else ""
