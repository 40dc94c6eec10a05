"""Write what the READMEs generate: measured tables, and the API on one page.

    python benchmarks/readme.py          # rewrites README.md and benchmarks/README.md
    python benchmarks/readme.py --check  # fails if one of them is not what the files say

What is generated stands between `<!-- name: benchmarks/readme.py -->` and `<!-- end of name -->`.
"""

import pathlib
import sys
from collections.abc import Callable, Mapping

from benchmarks.readme import _api as readme_api
from benchmarks.readme import _headline as readme_headline
from benchmarks.readme import _tables as readme_tables

ROOT = pathlib.Path(__file__).parents[2]
PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {
        "example": readme_headline.example,
        "headline": readme_headline.headline,
        "trained": readme_headline.trained,
        "api": readme_api.page,
    },
    "benchmarks/README.md": {
        "training": readme_tables.training,
        "recompute": readme_tables.recomputation,
        "segments": readme_tables.cuts,
        "plan": readme_tables.plans,
        "peers": readme_tables.peers,
        "network": readme_tables.networks,
        "dgc": readme_tables.compression,
        "convergence": readme_tables.convergence,
        "together": readme_tables.joined,
    },
}


def written(old: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """The page with its generated parts made anew."""
    for name, make in parts.items():
        start, end = f"<!-- {name}: benchmarks/readme.py -->\n", f"<!-- end of {name} -->\n"
        before, rest = old.split(start)
        old = before + start + make() + end + rest.split(end)[1]
    return old


def main() -> None:
    for page, parts in PAGES.items():
        path = ROOT / page
        old = path.read_text()
        new = written(old, parts)
        if "--check" not in sys.argv:
            path.write_text(new)
        elif new != old:
            raise SystemExit(f"{page}: run python benchmarks/readme.py")


if __name__ == "__main__":
    main()
