"""The table of README.md, the example's output, and where training ends.

`MODELS` are the models of the first rows with the sizes that `benchmarks/_models` gives them.
"""

from collections.abc import Iterator
from typing import Any

from rich.console import Console

from benchmarks._lib.examples import common, train_gpt
from benchmarks._lib.report import has_result, result
from benchmarks._lib.table import Row, Table
from benchmarks._private import memory_text, network_text, seconds_text
from benchmarks.convergence._tables import brief
from benchmarks.targets._largest_tables import PLAN
from benchmarks.targets._models import PLAIN

MODELS = {
    "gpt": "GPT, 12 x 256, 4 x 512 tokens",
    "resnet": "ResNet-50, 64 images, 32 x 32",
    "linen": "linen ViT, 6 x 256, 16 images, 64 x 64",
}

ON_TARGETS = (
    "gpt2_124m h100", "gpt2_1.5b h100", "llama_1b h100", "vit_l h100", "resnet50 h100",
)  # fmt: skip


def example() -> str:
    """Return the table that the first command prints, from the figures of its run."""
    common.console = Console(width=88, color_system=None)
    with common.console.capture() as printed:
        train_gpt.show(result("train_gpt"))
    return f"```\n{printed.get()}```\n"


def headline() -> str:
    """Return a row for each kind of saving: memory, gradient bytes, time on slow links."""
    rows = [*memory_rows(), *target_rows(), *byte_rows(), *network_rows(), *training_rows()]
    return Table("", ("", "without jrc", "with jrc", "", "price"), rows).markdown()


def settings(what: str, without: str = "", ours: str = "") -> Row:
    """Return the row above those that share what they measure and the settings of both sides."""
    return (f"**{what}**", without, ours, "", "")


def memory_rows() -> Iterator[Row]:
    """Yield the peaks of three models with nothing recomputed and with a plan."""
    yield settings("Peak of the compiled gradient", "nothing recomputed", "`jrc.plan`")
    models = result("plan")["models"]
    for name, sizes in MODELS.items():
        model = models[name]
        base, lean = model["baseline"], model["beside"]["quarter"]
        yield (
            sizes,
            memory_text(base["peak"]),
            memory_text(lean["peak"]),
            f"1/{base['peak'] / lean['peak']:.1f}",
            f"{100 * (lean['flops'] / base['flops'] - 1):.1f} % more FLOPs",
        )


def target_rows() -> Iterator[Row]:
    """Yield the largest batches of accelerators that are not there, bytes of their compilers."""
    if not has_result("targets.json"):
        return
    rows = result("targets")["rows"]
    yield settings("Largest batch, compiled for", "nothing recomputed", "`jrc.plan`")
    for key in (key for key in ON_TARGETS if key in rows):
        row, (plain, plan) = rows[key], (rows[key]["ways"][way] for way in (PLAIN, PLAN))
        more = f"{plan['batch'] / plain['batch']:.1f} x" if plain["batch"] else ""
        yield (
            f"{row['model']}, {row['target']}",
            f"{plain['batch']:,}" if plain["batch"] else "none",
            f"{plan['batch']:,}",
            more,
            f"{100 * (plan['flops'] - 1):.1f} % more FLOPs",
        )


def byte_rows() -> Iterator[Row]:
    """Yield the gradient bytes of both models, dense float32 and compressed."""
    yield settings("Gradient bytes, 99.9 %", "float32", '`wire="bf16"`, `min_size=0`')
    for name, model in result("dgc")["payload"]["models"].items():
        (row,) = (r for r in model["rows"] if r["wire"] == "bf16" and r["all_leaves"])
        dense = 4 * model["parameters"]
        size = "" if name[-1] == "M" else f", {_millions(model['parameters'])}"
        yield (
            f"{name}{size}",
            network_text(dense),
            network_text(row["payload"]),
            f"1/{dense / row['payload']:,.0f}",
            "8 bytes a parameter",
        )


def network_rows() -> Iterator[Row]:
    """Yield DGC beside the faster of the two dense exchanges, JAX's and PyTorch's."""
    found = result("network")
    size = _millions(found["parameters"])
    yield settings(f"Step of {size}, 99.9 %", "float32", '`wire="f32"`, `min_size=16384`')
    for name in ("4 processes, 100 Mbit/s",):
        run = found["runs"][name]
        dense = min((run[way] for way in ("dense", "ddp") if way in run), key=_seconds)
        whose = "PyTorch DDP" if dense is run.get("ddp") else "JAX"
        yield (
            name,
            f"{seconds_text(dense['seconds'])} ({whose})",
            seconds_text(run["dgc"]["seconds"]),
            f"1/{dense['seconds'] / run['dgc']['seconds']:.1f}",
            "8 bytes a parameter",
        )


def training_rows() -> Iterator[Row]:
    """Yield a whole training step with few synchronisations beside the faster dense exchange."""
    found = result("network_training")
    size = _millions(found["parameters"])
    yield settings(f"Training step of {size}, AdamW", "float32", "`outer=jrc.SparseLoCo(30)`")
    name = "4 processes, 100 Mbit/s"
    methods = found["runs"][name]["methods"]
    dense = min((methods[way] for way in ("adamw", "ddp") if way in methods), key=_seconds)
    whose = "PyTorch DDP" if dense is methods.get("ddp") else "JAX"
    ours = methods["sparseloco_30"]
    yield (
        name,
        f"{seconds_text(dense['seconds'])} ({whose})",
        seconds_text(ours["seconds"]),
        f"1/{dense['seconds'] / ours['seconds']:.1f}",
        "8 bytes a parameter",
    )


def _millions(parameters: int) -> str:
    return f"{parameters / 1e6:.1f} M parameters"


def _seconds(way: dict[str, Any]) -> float:
    return way["seconds"]


def trained() -> str:
    """Return where training ends dense and at two densities, on four replicas."""
    return brief(result("convergence")).markdown() if has_result("convergence.json") else ""
