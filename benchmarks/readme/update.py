"""Write the generated parts of README.md, docs/, examples/ and benchmarks/: tables, the API.

    python -m benchmarks.readme.update
    python -m benchmarks.readme.update --check

With `--check` nothing is written, and the exit status is 1 if a page is not what the files in
`benchmarks/results` give. A generated part stands between `<!-- name: benchmarks.readme.update -->`
and `<!-- end of name -->`.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence

from benchmarks._lib.child import ROOT
from benchmarks.dgc import accelerators
from benchmarks.memory import autochunker
from benchmarks.readme import _api, _headline
from benchmarks.readme._parts import PARTS, part, regrets
from benchmarks.targets import _largest_tables, longest_sequence, prediction, sharded_step

PAGES: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "README.md": {"headline": _headline.headline},
    "docs/api.md": {"api": _api.page},
    "docs/benchmarks.md": {"trained": _headline.trained},
    "docs/chunks.md": {
        "autochunker": part("autochunker", autochunker.tables),
        "longest": part("longest_sequence", longest_sequence.tables),
    },
    "docs/dgc.md": {"accelerators": part("accelerators", accelerators.tables)},
    "docs/meshes.md": {"sharded_step": part("sharded_step", sharded_step.tables)},
    "docs/targets.md": {
        "largest": part("targets", _largest_tables.brief),
        "prediction": part("prediction", prediction.tables),
        "regret": regrets,
    },
    "examples/README.md": {"example": _headline.example},
    "benchmarks/README.md": PARTS,
}


def written(old: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """Return a page with its generated parts replaced."""
    for name, make in parts.items():
        start, end = f"<!-- {name}: benchmarks.readme.update -->\n", f"<!-- end of {name} -->\n"
        before, rest = old.split(start)
        old = before + start + make() + end + rest.split(end)[1]
    return old


def main(argv: Sequence[str] | None = None) -> None:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail on a difference")
    check = parser.parse_args(argv).check
    for page, parts in PAGES.items():
        path = ROOT / page
        old = path.read_text()
        new = written(old, parts)
        if not check:
            path.write_text(new)
        elif new != old:
            raise SystemExit(f"{page}: run python -m benchmarks.readme.update")


if __name__ == "__main__":
    main()
