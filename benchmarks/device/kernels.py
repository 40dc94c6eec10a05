"""Compare seconds of kernels that a GPU ran with those that jrc states for them.

    python -m benchmarks.device.all --only seconds --kernels KERNELS --out FOLDER
    python -m benchmarks.device.kernels --kernels KERNELS --seconds FOLDER/seconds.json

Nothing is run: the folder has each program's compiled text and the seconds of its kernels. A kernel
of XLA has the name of its instruction; those of libraries are told by their names. Of a conditional
all branches count. Stated are the seconds of today's rates, without the time to launch a kernel,
which the profiler does not see. A rate that is fitted to a folder has no error of its own: say
which programs it was fitted to.
"""

import argparse
import gzip
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jrc
from benchmarks._lib.command import Benchmark, Run
from benchmarks._lib.report import Report
from benchmarks._lib.table import Row, Table
from benchmarks._private import StatedKernel, seconds_text, stated_kernels

NAME = "device.kernels"
PRODUCTS, COPIES, OTHERS = "products", "copies", "other kernels"
KINDS = (PRODUCTS, COPIES, OTHERS)
# Of kernels that have not the name of an instruction.
_NAMES = {
    COPIES: re.compile(r"^mem(cpy|set)", re.IGNORECASE),
    PRODUCTS: re.compile(
        r"gemm|cutlass|nvjet|xmma|cublas|splitk|conv|fprop|dgrad|wgrad", re.IGNORECASE
    ),
}


def measure(run: Run) -> None:
    """Fill the report with each program's seconds, measured and stated, by kind of kernel."""
    options, target = run.options, jrc.target(run.options.target)
    known = json.loads(options.seconds.read_text())["rows"] if options.seconds else {}
    run.report["target"] = target.name
    rows = run.report.setdefault("rows", {})
    for path in sorted(options.kernels.glob("*.json.gz")):
        name = path.name.removesuffix(".json.gz")
        run.status(name)
        with gzip.open(path, "rt") as file:
            programs = json.load(file)
        measured = known.get(name, {}).get("programs", {})
        rows[name] = {
            way: compared(each, target) | {"seconds": measured.get(way, {}).get("seconds")}
            for way, each in programs.items()
        }
        run.save()


def compared(program: Mapping[str, Any], target: jrc.Target) -> Report:
    """Return seconds by kind of kernel of one run of a program, measured and stated, and in all."""
    stated, whole = stated_kernels(program["text"], target)
    found: dict[str, dict[str, float]] = {
        side: dict.fromkeys(KINDS, 0.0) for side in ("measured", "stated")
    }
    for each in stated:
        found["stated"][kind_of(each)] += each.times * each.seconds
    kinds = {_plain(each.name): kind_of(each) for each in stated}
    for _, _, name, _, seconds in program["kernels"]:
        kind = kinds.get(_plain(name)) or kinds.get(_family(name))
        if kind is None:
            kind = next((kind for kind, found in _NAMES.items() if found.search(name)), OTHERS)
        found["measured"][kind] += seconds / program["calls"]
    times = sum(times for *_, times, _ in program["kernels"]) / program["calls"]
    return found | {"kernels": round(times), "stated_in_all": whole}


def kind_of(kernel: StatedKernel) -> str:
    """Return the kind of a kernel."""
    if kernel.multiplies:
        return PRODUCTS
    return COPIES if kernel.opcode in ("fusion-start", "copy") else OTHERS


def _plain(name: str) -> str:
    return re.sub(r"[.-]", "_", name)


def _family(name: str) -> str:
    """The name without its number: kernels that are alike are one, with the name of the first."""
    return re.sub(r"_\d+$", "", _plain(name))


def tables(report: Report) -> list[Table]:
    """Return a row for each program: seconds of its ways added up, ratios by kind of kernel."""
    heads = (
        "", "ways", "kernels", "measured", "of these kernels run", "stated",
        *(f"{kind}: stated over measured" for kind in KINDS),
    )  # fmt: skip
    lines = [_line(name, list(ways.values())) for name, ways in report["rows"].items()]
    return [Table(f"Kernels, measured and stated ({report['target']})", heads, lines)]


def _line(name: str, ways: Sequence[Mapping[str, Any]]) -> Row:
    known = [each["seconds"] for each in ways if each["seconds"]]
    return (
        name,
        str(len(ways)),
        str(sum(each["kernels"] for each in ways)),
        seconds_text(sum(known)) if len(known) == len(ways) else "-",
        seconds_text(sum(sum(each["measured"].values()) for each in ways)),
        seconds_text(sum(each["stated_in_all"] for each in ways)),
        *(_ratio(ways, kind) for kind in KINDS),
    )


def _ratio(ways: Sequence[Mapping[str, Any]], kind: str) -> str:
    measured, stated = (sum(each[side][kind] for each in ways) for side in ("measured", "stated"))
    return f"{stated / measured:.2f}" if stated and measured else "-"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the folder, the seconds of whole programs, and the target."""
    add = parser.add_argument
    add("--kernels", type=pathlib.Path, required=True, help="folder of device.all --kernels")
    add("--seconds", type=pathlib.Path, help="seconds.json of the same run")
    add("--target", default="h100", help="a name of jrc.targets() (default: h100)")


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse a folder without kernels."""
    if not any(options.kernels.glob("*.json.gz")):
        parser.error(
            "--kernels must be a folder with the .json.gz files of benchmarks.device.all, "
            f"got {options.kernels} without any. Run that with --kernels first."
        )


BENCHMARK = Benchmark(NAME, __doc__, measure, tables, add_options, check_options, platform="cpu")
main = BENCHMARK.main

if __name__ == "__main__":
    main()
