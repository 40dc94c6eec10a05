"""One device and a GPT of GPT-2's size: how much fits, and how fast it is at equal memory.

    python benchmarks/scale.py [--toy] [--platform gpu] [--memory 16GiB] [--only sizes,speed]
                               [--dtype bfloat16] [--out benchmarks/results/scale.json]

- `sizes`: the largest batch at the model's length, and the longest sequence of one row, whose
  gradient fits the device's memory with nothing re-run and with a plan. On an accelerator the
  largest are then run, and the first that does not fit without a plan is tried too.
- `speed`: tokens per second of the gradient by each way that users write by hand (full remat,
  JAX's and MaxText's policies), and by the plan whose budget is that way's peak. The two and the
  program with nothing re-run, where it fits, take turns; medians and quartiles of the rounds.

Bytes are XLA's for the compiled gradient; FLOPs are counted in the program, loops times their
length. Without `--memory` it is nine tenths of what the device's allocator has. On a CPU, which
tells no such figure, `--memory` must be given, and sizes are compiled, not run. Parameters, and
so gradients, are float32; `--dtype` is what the model computes in.
"""

import argparse
import functools
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import jax
from rich.console import Console

from benchmarks._lib import platform as machine
from benchmarks._lib.examples import write_json
from benchmarks._lib.report import opened, terminal_table
from benchmarks.memory._scale_measure import Model, sizes, speed
from benchmarks.memory._scale_policies import PLAIN, WAYS
from jrc.models import gpt
from jrc.remat._budget import checked_budget

SECTIONS = ("sizes", "speed")
GPT2 = gpt.Config(50257, layers=12, heads=12, width=768, length=1024, scan=True)
TOY = gpt.Config(256, layers=2, heads=2, width=32, length=64, scan=True)
TOY_MEMORY, TOY_WAYS = 3_000_000, ("save_qkv_proj",)


def rows_of_sizes(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table of what fits."""

    def row(what: str, at: dict[str, Any]) -> tuple[str, ...]:
        ratio = f"{at['planned'] / at['plain']:.2f} x" if at["plain"] else "-"
        flops = f"{at['flops']:.3f}" if "flops" in at else "-"
        ran = ", ".join(
            f"{name}: {'ran' if done else 'out of memory'}"
            for name, done in at.get("ran", {}).items()
            if done is not None
        )
        return what, f"{at['plain']:,}", f"{at['planned']:,}", ratio, flops, ran or "compiled only"

    head = ("", "nothing re-run", "with a plan", "ratio", "FLOPs", "tried")
    names = {"batch": "largest batch", "sequence": "longest sequence"}
    return [head, *(row(title, found[name]) for name, title in names.items())]


def rows_of_speed(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table of tokens per second; a ratio is the median of those of the rounds."""
    tokens = found["batch"] * found["length"]

    def cell(seconds: Sequence[float] | None) -> str:
        if not seconds:
            return "-"
        low, middle, high = (
            tokens / s for s in statistics.quantiles(seconds, n=4, method="inclusive")[::-1]
        )
        return f"{middle:,.0f} ({low:,.0f}–{high:,.0f})"

    def over(seconds: dict[str, list[float]], name: str, base: str) -> str:
        if name not in seconds or base not in seconds:
            return "-"
        pairs = zip(seconds[base], seconds[name], strict=True)
        return f"{statistics.median(b / s for b, s in pairs):.3f}"

    def row(name: str, at: dict[str, Any]) -> tuple[str, ...]:
        seconds, plan = at.get("seconds", {}), at.get("plan")
        return (
            name,
            f"{at['peak'] / 2**20:,.0f} MiB" + ("" if seconds else ", not run"),
            f"{at['flops']:.3f}",
            cell(seconds.get("theirs")),
            f"{plan['flops']:.3f}" if plan else "-",
            cell(seconds.get("plan")),
            over(seconds, "plan", "theirs"),
            over(seconds, "plan", "plain"),
        )

    head = (
        "", "peak", "FLOPs", "tokens/s", "plan's FLOPs", "plan's tokens/s", "plan to it",
        "plan to nothing re-run",
    )  # fmt: skip
    return [head, *(row(name, at) for name, at in found["rows"].items())]


def titles(report: dict[str, Any]) -> dict[str, str]:
    """What stands above each table."""
    found: dict[str, str] = {}
    for name in (name for name in SECTIONS if name in report):
        at = report[name]
        where = f"{report['model']}, {at['dtype']} ({at['device']}, jax {at['jax']})"
        if name == "sizes":
            found[name] = f"{where}: gradients that fit {at['memory'] / 1e9:,.3g} GB"
        else:
            found[name] = (
                f"{where}, {at['batch']} x {at['length']} tokens: medians and quartiles of "
                f"{at['laps'][1]} rounds; the plan's budget is the peak of what stands beside it"
            )
    return found


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", default=",".join(SECTIONS), help="default: %(default)s")
    add("--ways", default=",".join(name for name in WAYS if name != PLAIN), help="of the speed")
    add("--memory", help="bytes, or as 16GiB (default: what the device tells)")
    add("--batch", type=int, default=8, help="sequences, for the speed (default: %(default)s)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--rounds", type=int, default=20, help="that count (default: %(default)s)")
    add("--warm-up", type=int, default=3, help="rounds before them (default: %(default)s)")
    add("--toy", action="store_true", help="tiny, to see that it runs")
    machine.add_platform(parser)
    add("--out", type=pathlib.Path, help="JSON file to read and write")
    options = parser.parse_args(argv)
    for name, known in (("only", SECTIONS), ("ways", tuple(WAYS))):
        asked = getattr(options, name).split(",")
        if unknown := [each for each in asked if each not in known]:
            parser.error(f"--{name}: there are {', '.join(known)}; got {', '.join(unknown)}")
        setattr(options, name, asked)
    if min(options.batch, options.warm_up) < 1 or options.rounds < 2:
        parser.error("--batch, --warm-up: 1 at least; --rounds: 2 at least")
    try:
        options.memory = options.memory and checked_budget(options.memory, "--memory")
    except ValueError as error:
        parser.error(str(error))
    if options.toy:
        options.rounds, options.warm_up, options.batch = 2, 1, 2
        options.ways = TOY_WAYS
        options.memory = options.memory or TOY_MEMORY
    return options


def memory_of_device() -> int:
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        sys.exit("scale.py: this device does not tell its memory. Say it: --memory 16GiB.")
    return int(0.9 * stats["bytes_limit"])


def main(argv: list[str] | None = None) -> dict[str, Any]:
    options = arguments(argv)
    machine.use(options.platform)
    model = Model(TOY if options.toy else GPT2, options.dtype)
    memory = options.memory or memory_of_device()
    run = options.toy or jax.default_backend() != "cpu"
    laps = (options.warm_up, options.rounds)
    studies = {
        "sizes": functools.partial(sizes, model, memory, run),
        "speed": functools.partial(speed, model, memory, options.batch, options.ways, laps),
    }
    old = opened(options.out, "scale.py", "toy", "model")
    if old and old["toy"] != options.toy:
        sys.exit(f"scale.py: {options.out} holds {'toy' if old['toy'] else 'full'} figures")
    name = f"GPT {model.config.layers} x {model.config.width}"
    report = {**old, "toy": options.toy, "model": name}
    console = Console()
    with console.status("") as status:
        for section in options.only:
            began = machine.about() | {"dtype": options.dtype}
            report[section] = began | studies[section](status.update)
            if options.out:
                write_json(options.out, report)
    for section, title in titles(report).items():
        rows = {"sizes": rows_of_sizes, "speed": rows_of_speed}[section](report[section])
        console.print(terminal_table(title, rows))
    return report


if __name__ == "__main__":
    main()
