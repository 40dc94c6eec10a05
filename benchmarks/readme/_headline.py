"""The table of README.md, the example's output, and where training ends.

The model of the first row has the sizes that `benchmarks/_models` gives it.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console

from benchmarks._lib.examples import common, train_gpt
from benchmarks._lib.report import has_result, result
from benchmarks._lib.table import Row, Table
from benchmarks._private import memory_text, network_text
from benchmarks.convergence._tables import brief, finals
from benchmarks.convergence.outer import gaps_text, to_dense
from benchmarks.convergence.rates import best_rate
from benchmarks.targets._largest_tables import PLAN
from benchmarks.targets._models import FULL

# Methods of `benchmarks.network.training`, of which `benchmarks.convergence` has the loss.
LINKS = ("1 Gbit/s", "100 Mbit/s")
NETWORK = {"sparseloco_15": "`SparseLoCo(15)`, AdamW", "dgc": "DGC 99.9 %, momentum SGD"}


def example() -> str:
    """Return the table that the first command prints, from the figures of its run."""
    common.console = Console(width=88, color_system=None)
    with common.console.capture() as printed:
        train_gpt.show(result("train_gpt"))
    return f"```\n{printed.get()}```\n"


def headline() -> str:
    """Return a row for each kind of saving: memory, gradient bytes, time on slow links."""
    rows = [*memory_rows(), *target_rows(), *chunk_rows(), *card_rows(), *byte_rows()]
    rows += network_rows()
    return Table("", ("", "without jrc", "with jrc", "", "what it costs"), rows).markdown()


def settings(what: str, without: str = "", ours: str = "") -> Row:
    """Return the row above those that share what they measure and the settings of both sides."""
    return (f"**{what}**", without, ours, "", "")


def memory_rows() -> Iterator[Row]:
    """Yield the peak of a GPT, of the baseline and of a plan."""
    yield settings("Peak of the compiled gradient", "baseline", "`jrc.plan`")
    model = result("plan")["models"]["gpt"]
    base, lean = model["baseline"], model["beside"]["quarter"]
    yield (
        "GPT, 12 x 256, 4 x 512 tokens",
        memory_text(base["peak"]),
        memory_text(lean["peak"]),
        f"1/{base['peak'] / lean['peak']:.1f}",
        f"{100 * (lean['flops'] / base['flops'] - 1):.1f} % more FLOPs",
    )


def target_rows() -> Iterator[Row]:
    """Yield the largest batch on a target: of the best way by hand, and of a plan."""
    yield settings("Compiled for an absent H100, bfloat16", "best by hand", "`jrc.plan`")
    rows = result("targets")["rows"] if has_result("targets.json") else {}
    for key in (key for key in ("llama_1b h100",) if key in rows):
        ways = dict(rows[key]["ways"])
        plan = ways.pop(PLAN)
        name, best = max(ways.items(), key=lambda way: (way[1]["batch"], -way[1]["flops"]))
        yield (
            f"{rows[key]['model']}, batch",
            f"{best['batch']:,} ({'every block' if name == FULL else name})",
            f"{plan['batch']:,}",
            f"{plan['batch'] / best['batch']:.1f} x",
            f"{_more(plan)} % more FLOPs (by hand {_more(best)} %)",
        )


def _more(way: Mapping[str, Any]) -> str:
    return f"{100 * (way['flops'] - 1):.0f}"


def card_rows() -> Iterator[Row]:
    """Yield what ran on an accelerator: a gradient, large batches, PyTorch beside a plan."""
    if not has_result("h100/seconds.json"):
        return
    yield settings("Measured on an H100, bfloat16")
    programs = result("h100/seconds")["rows"]["gpt2_124m"]["programs"]
    base, plan = programs["baseline"], programs["plan, 0.25"]
    yield (
        "GPT-2 124M, scan, 8 x 1,024 tokens",
        _bytes_and_seconds(base["peak"], base["seconds"]),
        _bytes_and_seconds(plan["peak"], plan["seconds"]),
        f"1/{base['peak'] / plan['peak']:.1f}",
        f"{plan['seconds'] / base['seconds']:.2f} x time",
    )
    sizes = result("h100/sizes")["rows"]
    base, plan = sizes["GPT-2 124M, batch 32, nothing recomputed"], sizes["GPT-2 124M, batch 1,024"]
    rates = [row["tokens"] / min(row["seconds"]) for row in (base, plan)]
    yield (
        f"The same, batch within {plan['stated'] / 2**30:.0f} GiB",
        f"32, {rates[0] / 1e3:.0f}k tokens/s",
        f"1,024, {rates[1] / 1e3:.0f}k tokens/s",
        "32 x",
        f"{rates[0] / rates[1]:.2f} x time",
    )
    ((_, row),) = result("h100/torch")["rows"].items()
    theirs, ours = (
        row["ways"][way] for way in ("PyTorch, compiled, budget 0.25", "JAX, plan, 0.25")
    )
    yield (
        "Unrolled; without: `torch.compile`",
        _bytes_and_seconds(theirs["resident"], theirs["seconds"]),
        _bytes_and_seconds(ours["resident"], ours["seconds"]),
        f"{ours['resident'] / theirs['resident']:.2f} x",
        f"{ours['seconds'] / theirs['seconds']:.2f} x time",
    )


def _bytes_and_seconds(size: int, seconds: float) -> str:
    return f"{size / 2**30:.1f} GiB, {1e3 * seconds:.1f} ms"


def chunk_rows() -> Iterator[Row]:
    """Yield what chunks fit: the longest sequence of a Llama, and a head with its loss."""
    if has_result("longest_sequence.json"):
        report = result("longest_sequence")
        by_hand, plan = (_longest(report, way) for way in ("every block", "plan"))
        more = 100 * (report["rows"][str(plan)]["plan"]["flops"] - 1)
        yield (
            "Llama 1B, tokens of one sequence",
            f"{by_hand:,} (every block)",
            f"{plan:,}",
            f"{plan / by_hand:.0f} x",
            f"{more:.0f} % more FLOPs",
        )
    if has_result("autochunker.json"):
        report = result("autochunker")
        plan = report["rows"]["32"]
        base = report["baseline"]
        yield (
            "Head and loss, 32k tokens, 128k words",
            f"{base['peak'] / 1e9:.1f} GB",
            f"{plan['peak'] / 1e9:.2f} GB",
            f"1/{base['peak'] / plan['peak']:.0f}",
            f"{100 * (plan['flops'] - 1):.2f} % more FLOPs, "
            f"{plan['stated'] / base['stated']:.1f} x time",
        )


def _longest(report: Mapping[str, Any], way: str) -> int:
    """The most tokens of which the program fits the budget."""
    return max(
        int(length)
        for length, row in report["rows"].items()
        if (row[way]["peak"] or math.inf) <= report["budget"]
    )


def byte_rows() -> Iterator[Row]:
    """Yield the gradient bytes of a model, dense float32 and compressed."""
    yield settings("Gradient bytes, 99.9 %", "float32", '`wire="bf16"`, `min_size=0`')
    name = "GPT-2 124M"
    model = result("dgc")["payload"]["models"][name]
    (row,) = (r for r in model["rows"] if r["wire"] == "bf16" and r["all_leaves"])
    dense = 4 * model["parameters"]
    yield (
        name,
        network_text(dense),
        network_text(row["payload"]),
        f"1/{dense / row['payload']:,.0f}",
        "8 bytes a parameter",
    )


def network_rows() -> Iterator[Row]:
    """Yield training steps beside PyTorch's DDP, with what each method costs in loss."""
    found, lost = result("network_training"), _lost()
    what = f"Training step, GPT of {_millions(found['parameters'])}"
    yield settings(what, "PyTorch DDP, AdamW", "4 processes, 2 cores")
    runs = [found["runs"][f"4 processes, {link}"]["methods"] for link in LINKS]
    for method, name in NETWORK.items():
        dense, ours = ([run[way]["seconds"] for run in runs] for way in ("ddp", method))
        yield (
            name,
            ", ".join(f"{x:.1f}" for x in dense) + " s",
            ", ".join(f"{x:.1f}" for x in ours) + " s",
            ", ".join(f"1/{x / y:.0f}" for x, y in zip(dense, ours, strict=True)),
            lost[method],
        )


def _lost() -> dict[str, str]:
    """Return how far the loss of each method is from dense training with its inner optimizer.

    AdamW has the best rate of each; momentum SGD that which was best for dense training.
    """
    runs = result("outer_rates_2x64")["runs"]
    best = {name: found[best_rate(found)] for name, found in runs.items()}
    small = result("convergence")["tasks"]["gpt"]
    ours, dense = (finals(small, small["runs"][name]) for name in ("dgc_4", "dense_4"))
    gaps = {
        "sparseloco_15": (to_dense(best["sparseloco_15"], best["adamw"]), "AdamW"),
        "dgc": (gaps_text(ours, dense), "SGD"),
    }
    return {
        name: f"{gap.partition(' ')[0]} loss, of dense {inner}"
        for name, (gap, inner) in gaps.items()
    }


def _millions(parameters: int) -> str:
    return f"{parameters / 1e6:.1f} M parameters"


def trained() -> str:
    """Return where training ends dense and at two densities, on four replicas."""
    return brief(result("convergence")).markdown() if has_result("convergence.json") else ""
