"""Gradient compression measured: bytes of a step, bytes by replicas, selectors, compile time.

    python benchmarks/dgc.py [--toy] [--only payload,replicas,selectors,compile]
                             [--out benchmarks/results/dgc.json]

- `payload`: bytes of a step of ResNet-50 and GPT-2 124M at 99.9 % in each wire format.
- `replicas`: bytes that one of N replicas of a ResNet-50 sends, for each exchange.
- `selectors`: time of each selector, beside one pass over the data and in a whole step, and the
  share of the exact choice's mass that it takes.
- `compile`: compile time of a ramp of five levels beside that of a fixed one.

The first two allocate nothing: bytes are those of the collectives in the lowered program, and where
`jrc.dgc_stats` would say something else the script fails. Sections that are not asked for stay in
`--out` as they were.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console

from benchmarks._lib import platform as machine
from benchmarks._lib.report import opened
from benchmarks.dgc import _bytes as dgc_bytes
from benchmarks.dgc import _compile as dgc_compile
from benchmarks.dgc import _selectors as dgc_select
from benchmarks.dgc._tables import show

SECTIONS = ("payload", "replicas", "selectors", "compile")


def study(section: str, options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """What one section finds."""
    if section == "payload":
        return dgc_bytes.payloads(options.toy, say)
    if section == "replicas":
        return dgc_bytes.by_replicas(options.toy, say)
    if section == "selectors":
        return dgc_select.study(options.toy, options.rounds, say)
    say("compiling in a process of its own")
    rows = dgc_compile.in_child(options.repeats, options.toy, options.platform)
    return {"repeats": options.repeats, "rows": rows}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", default=",".join(SECTIONS), help="sections (default: %(default)s)")
    add("--rounds", type=int, default=15, help="calls of each selector (default: %(default)s)")
    add("--repeats", type=int, default=5, help="compilations of each (default: %(default)s)")
    add("--toy", action="store_true", help="tiny, to see that it runs")
    machine.add_platform(parser)
    add("--out", type=pathlib.Path, help="JSON file to read and write")
    options = parser.parse_args(argv)
    options.only = options.only.split(",")
    if unknown := [name for name in options.only if name not in SECTIONS]:
        parser.error(f"--only: sections are {', '.join(SECTIONS)}; got {', '.join(unknown)}")
    if options.rounds < 2 or options.repeats < 1:
        parser.error("--rounds: 2 at least; --repeats: 1 at least")
    if options.toy:
        options.rounds, options.repeats = 2, 1
    return options


def main(argv: list[str] | None = None) -> dict[str, Any]:
    options = arguments(argv)
    machine.use(options.platform)
    console = Console()
    old = opened(options.out, "dgc.py", "toy")
    if old and old["toy"] != options.toy:
        sys.exit(f"dgc.py: {options.out} holds {'toy' if old['toy'] else 'full'} figures")
    report = {**old, "toy": options.toy}
    with console.status("") as status:
        for section in options.only:
            began = machine.about()
            found = study(section, options, lambda said: status.update(said))
            report[section] = began | found
            if options.out:
                options.out.write_text(json.dumps(report, indent=1) + "\n")
    show(console, report, options.only)
    return report


if __name__ == "__main__":
    main()
