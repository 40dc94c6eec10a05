"""Measure on an accelerator everything that one is wanted for, in nine minutes at most.

    python -m benchmarks.device.all --out FOLDER
    python -m benchmarks.device.all --out FOLDER --show
    python -m benchmarks.device.all --toy --platform cpu --out FOLDER

The parts, each with a JSON file in the folder, the most valuable first:

- `peaks`: the peak of ten gradient programs, as the device's compiler and the compile-only target
  of the same chip state it, and as the device's allocator saw it.
- `seconds`: seconds of ten programs, stated and measured: nothing recomputed, every block by hand,
  and four plans.
- `sizes`: large batches and long sequences of GPT-2 and Llama run for three steps, in as little
  memory as was stated, and in too little.
- `selection`: seconds of one selection of DGC, by each selector.
- `offload`: bytes a second to the host's memory and back, and the share of copies that is hidden.
- `speed`: tokens a second of GPT-2 by ways that users write, and of the plan in as many bytes.
- `torch`: seconds and bytes of GPT-2's gradient in PyTorch and in JAX, where PyTorch is installed.
- `measured`: seconds of the plan that was chosen by measuring, and of that by stated seconds.

Each row is written when it is measured, and rows that the folder has are not measured again: the
same command continues. A row that fails has its error. A part that does not end in its share of
the time is stopped, and what it leaves of its time is for those behind it. Nothing else should run
on the device. This process uses no device; each part is a process of its own.
"""

import argparse
import dataclasses
import pathlib

from benchmarks._lib.command import Benchmark, Run, at_least, names_of
from benchmarks._lib.report import Report
from benchmarks._lib.table import Table
from benchmarks.device._parts import PARTS, run_parts
from benchmarks.device._tables import TABLES

NAME = "device.all"
SECONDS = 530


def measure(run: Run) -> None:
    """Measure what the folder does not have."""
    options = vars(run.options)
    if not options["show"]:
        run_parts(options["only"], run.report, options, run.save, run.status)


def tables(report: Report) -> list[Table]:
    """Return the tables of each part that the report has; the first says on what it ran."""
    found = []
    for name in (each for each in PARTS if each in report):
        first, *others = TABLES[name](report[name]["rows"])
        title = f"{first.title} ({place_of(report[name])})"
        found += [dataclasses.replace(first, title=title), *others]
    return found


def place_of(part: Report) -> str:
    """Return the device, the versions and the date of a part."""
    about = part.get("about")
    if about is None:
        return f"not measured: {part.get('stopped')}"
    text = (
        f"{about['device']}, jax {about['jax']}, jaxlib {about['jaxlib']}, jrc {about['jrc']}, "
        f"{about['date'][:10]}"
    )
    return f"{text}; stopped: {part['stopped']}" if "stopped" in part else text


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the parts, the time, and `--show`."""
    add = parser.add_argument
    add("--only", type=names_of(PARTS), default=list(PARTS), help="parts (default: all)")
    add("--seconds", type=at_least(1), default=SECONDS, help=f"of all parts; default: {SECONDS}")
    add("--plans", help="folder of benchmarks.device.plans (default: plans are made here)")
    add("--kernels", help="folder for programs' texts and seconds of kernels (default: none)")
    add("--show", action="store_true", help="print the tables of the folder, measure nothing")


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse a run without a folder, and plans that are not there."""
    if options.out is None:
        parser.error("--out must name a folder, got none: a run writes into it and continues it.")
    if options.plans and not pathlib.Path(options.plans).is_dir():
        parser.error(
            f"--plans must be a folder that benchmarks.device.plans wrote, got {options.plans}, "
            "which is none. Leave it out to make the plans here."
        )
    # Rows are measured by processes in another folder.
    for name in ("plans", "kernels"):
        if path := getattr(options, name):
            setattr(options, name, str(pathlib.Path(path).resolve()))


BENCHMARK = Benchmark(
    NAME, __doc__, measure, tables, add_options, check_options, keys=("toy", "rows"),
    files=tuple(PARTS),
)  # fmt: skip
main = BENCHMARK.main

if __name__ == "__main__":
    main()
