"""Count what compilers for accelerators make of a step of gradient compression.

    python -m benchmarks.dgc.accelerators --out benchmarks/results/accelerators.json
    python -m benchmarks.dgc.accelerators --targets h100:4 --forms exact,sharded

For each target and each way to choose and exchange entries: sorts, scatters and gathers of the
optimised program, its collectives, and its temporaries. A step writes only what was sent, at 99.9 %
on four devices, with as many equal matrices, donated.

Nothing is run, and no accelerator is needed. Compilations take up to two minutes: rows that `--out`
has are not measured again, and each is written as soon as it is there. A target whose compiler is
not installed is left out. `--label` names the rows, to compare two states of the code.
"""

import argparse
import collections
import math
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

import jrc
from benchmarks._lib import platform
from benchmarks._lib.command import Benchmark, Run, at_least, names_of
from benchmarks._lib.report import Report
from benchmarks._lib.table import Row, Table, mib
from benchmarks.dgc._steps import AXIS, in_place, optimizer, over_mesh

NAME = "dgc.accelerators"
FORMS: dict[str, dict[str, str]] = {
    **{
        name: {"selector": name, "exchange": "allgather"}
        for name in ("exact", "two_stage", "blocked", "global", "sampled")
    },
    "sharded": {"selector": "blocked", "exchange": "sharded"},
    "dense": {"exchange": "dense"},
    "exact_int8": {"selector": "exact", "exchange": "allgather", "wire": "int8"},
}
TARGETS = ("v5e:2x2", "h100:4")
COUNTED = ("sort", "scatter", "gather")
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
LABEL = "now"
TOY = {"side": 64, "leaves": 2}
_INSTRUCTION = re.compile(r" = (.*?) ([a-z][a-z0-9-]*)\(")
_SHAPE = re.compile(r"\[([\d,]*)\]")


def counts_of(text: str) -> dict[str, Any]:
    """Return how often operations stand in a compiled program, and the entries that are sorted.

    >>> counts_of("  %s = (f32[8,4]{1,0}, s32[8,4]{1,0}) sort(%x, %y), dimensions={1}")
    {'sort': 1, 'sorted': [32]}
    """
    found: collections.Counter[str] = collections.Counter()
    entries = set()
    for line in text.splitlines():
        instruction = _INSTRUCTION.search(line)
        if instruction is None:
            continue
        kind = instruction[2].removesuffix("-start")
        if kind in COUNTED + COLLECTIVES:
            found[kind] += 1
        if kind == "sort":
            shape = _SHAPE.search(instruction[1])
            entries.add(math.prod(int(n) for n in shape[1].split(",") if n) if shape else 1)
    return {**found, "sorted": sorted(entries, reverse=True)}


def compiled(target: jrc.Target, form: str, side: int, leaves: int) -> Any:
    """Return the compiled step of a form on all devices of a target."""
    mesh = Mesh(np.asarray(target.devices), (AXIS,), axis_types=(AxisType.Auto,))
    leaf = jax.ShapeDtypeStruct((side, side), jnp.float32)
    tx = optimizer(axis_name=AXIS, min_size=0, **FORMS[form])
    step, args = over_mesh(in_place(tx), tx, {f"w{i}": leaf for i in range(leaves)}, mesh)
    return step.lower(*args).compile()


def row_of(step: Any) -> dict[str, Any]:
    """Return what a compiled step has."""
    memory = step.memory_analysis()
    return counts_of(step.as_text()) | {
        "temporaries": memory.temp_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
    }


def measure(run: Run) -> None:
    """Compile every form for every target."""
    options = run.options
    run.report |= platform.machine() | {"leaf": 4 * options.side**2, "leaves": options.leaves}
    rows = run.report.setdefault("rows", {}).setdefault(options.label, {})
    for name in options.targets:
        target = jrc.target(name)
        try:
            _ = target.devices
        except ImportError as error:
            run.console.print(f"{name} is left out: {error}")
            continue
        found = rows.setdefault(name, {})
        for form in options.forms:
            if form not in found:
                run.status(f"{name}: {form}")
                began = time.perf_counter()
                row = row_of(compiled(target, form, options.side, options.leaves))
                found[form] = row | {"seconds": time.perf_counter() - began}
                run.save()


def tables(report: Report) -> list[Table]:
    """Return a table for each target."""
    size, leaves = report["leaf"], report["leaves"]
    heads = ("", *COUNTED, "entries of the largest sort", "collectives", "temporaries, MiB")
    targets = dict.fromkeys(name for rows in report["rows"].values() for name in rows)
    return [
        Table(
            f"A step of DGC at 99.9 %, {leaves} matrices of {mib(size, 1)} MiB, compiled for "
            f"{name} (jax {report['jax']})",
            heads,
            _rows(report["rows"], name),
        )
        for name in targets
    ]


def _rows(labels: dict[str, Any], target: str) -> list[Row]:
    alone = len(labels) == 1
    return [
        (form if alone else f"{form}, {label}", *_cells(labels[label][target][form]))
        for form in FORMS
        for label in labels
        if form in labels[label].get(target, {})
    ]


def _cells(row: dict[str, Any]) -> Row:
    largest = f"{row['sorted'][0]:,}" if row["sorted"] else ""
    sent = ", ".join(f"{row[kind]} {kind}" for kind in COLLECTIVES if row.get(kind))
    counts = (str(row.get(kind, 0)) for kind in COUNTED)
    return (*counts, largest, sent, mib(row["temporaries"], 1))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add targets, forms and sizes."""
    add = parser.add_argument
    add("--targets", type=lambda text: text.split(","), default=list(TARGETS))
    add("--forms", type=names_of(FORMS), default=list(FORMS), help="default: all")
    add("--side", type=at_least(16), default=1024, help="rows and columns of a matrix")
    add("--leaves", type=at_least(1), default=8, help="matrices")
    add("--label", default=LABEL, help="name of the rows, default: %(default)s")


BENCHMARK = Benchmark(
    NAME, __doc__, measure, tables, add_options, toy=TOY, keys=("rows",),
    platform="cpu",
)  # fmt: skip
main = BENCHMARK.main

if __name__ == "__main__":
    main()
