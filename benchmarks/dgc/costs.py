"""Measure what gradient compression costs and saves: bytes, selectors, compile time.

    python -m benchmarks.dgc.costs --out benchmarks/results/dgc.json
    python -m benchmarks.dgc.costs --only selectors --rounds 30

- `payload`: bytes of a step of ResNet-50 and GPT-2 124M at 99.9 % in each wire format.
- `replicas`: bytes that one of N replicas of a ResNet-50 sends, for each exchange.
- `selectors`: time of each selector, beside one pass over the data and in a whole step, and the sum
  of the magnitudes that it selects, over that of the exact choice.
- `compile`: compile time of a ramp of five levels beside that of a fixed one.

The first two allocate nothing: bytes are those of the collectives in the lowered program. Where
`jrc.dgc_stats` would report another number, the benchmark fails. Sections that are not asked for
stay in `--out` as they were.
"""

import argparse

from benchmarks._lib.command import Benchmark, Run, at_least, names_of
from benchmarks.dgc import _bytes, _compile, _selectors
from benchmarks.dgc._tables import TABLES, tables

TOY = {"rounds": 2, "repeats": 1}


def measure(run: Run) -> None:
    """Measure the sections."""
    options = run.options
    run.sections(
        {
            "payload": lambda: _bytes.payloads(options.toy, run.status),
            "replicas": lambda: _bytes.by_replicas(options.toy, run.status),
            "selectors": lambda: _selectors.study(options.toy, options.rounds, run.status),
            "compile": lambda: _compile.in_child(options.repeats, options.toy, options.platform),
        }
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the sections and how often to repeat."""
    add = parser.add_argument
    add("--only", type=names_of(TABLES), default=list(TABLES), help="sections (default: all)")
    add("--rounds", type=at_least(2), default=15, help="calls of each selector")
    add("--repeats", type=at_least(1), default=5, help="compilations of each program")


BENCHMARK = Benchmark("dgc.costs", __doc__, measure, tables, add_options, toy=TOY, keys=("toy",))
main = BENCHMARK.main

if __name__ == "__main__":
    main()
