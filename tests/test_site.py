"""The site of `docs/`: it builds without a warning or a network, and its links lead somewhere."""

import html.parser
import importlib.util
import pathlib
import subprocess
import sys
import urllib.parse

import pytest

DOCS = pathlib.Path(__file__).parents[1] / "docs"
MISSING = [p for p in ("sphinx", "myst_nb", "sphinx_book_theme") if not importlib.util.find_spec(p)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(MISSING), reason=f"{', '.join(MISSING)} not installed: pip install -e '.[docs]'"
    ),
]


class Page(html.parser.HTMLParser):
    """Collects what a page links to, what it loads, and the anchors that it has."""

    def __init__(self, path):
        super().__init__()
        self.links, self.loads, self.anchors = [], [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors.update(found[name] for name in ("id", "name") if found.get(name))
        if tag == "a" and found.get("href") is not None:
            self.links.append(found["href"])
        elif tag == "link":
            self.loads.append(found["href"])
        elif found.get("src"):
            self.loads.append(found["src"])


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Build the site and return its pages by path; `test_guides.py` runs the notebooks."""
    site = tmp_path_factory.mktemp("site") / "html"
    options = ["-W", "-q", "-D", "nb_execution_mode=off"]
    build = [sys.executable, "-m", "sphinx", *options, str(DOCS), str(site)]
    run = subprocess.run(build, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return {path: Page(path) for path in site.rglob("*.html") if "_static" not in path.parts}


def test_every_guide_is_a_page(pages):
    names = {path.stem for path in pages}
    assert {path.stem for kind in ("*.md", "*.ipynb") for path in DOCS.glob(kind)} <= names


def test_every_link_inside_the_site_leads_somewhere(pages):
    broken = []
    for path, page in pages.items():
        for link in page.links + page.loads:
            address = urllib.parse.urlsplit(link)
            if address.scheme:
                continue
            file = path.parent / urllib.parse.unquote(address.path) if address.path else path
            target = pages.get(file.resolve())
            anchor = urllib.parse.unquote(address.fragment)
            if not file.exists() or (anchor and target and anchor not in target.anchors):
                broken.append(f"{path.name}: {link}")
    assert not broken


def test_no_page_loads_from_a_network(pages):
    loads = {load for page in pages.values() for load in page.loads}
    assert [load for load in loads if urllib.parse.urlsplit(load).netloc] == []


def test_readmes_of_the_repository_are_pages(pages):
    (benchmarks,) = (page for path, page in pages.items() if path.stem == "benchmarks")
    assert "measurements.html#compression" in benchmarks.links
    assert not [link for page in pages.values() for link in page.links if "README" in link]


def test_the_api_has_whole_docstrings(pages):
    (api,) = (page for path, page in pages.items() if path.stem == "api")
    assert {"jrc.plan", "jrc.Plan.apply", "jrc.SparseLoCo", "cut-and-recompute"} <= api.anchors
    assert "#jrc.plan" in api.links
