"""README.md and `docs/`: every block of Python runs as it stands; every link leads somewhere."""

import importlib.util
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {page.stem: page for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
# The pages that a reader comes to first; the others take longer.
DEFAULT = ("README", "explain", "many_processes")
# What the last block of a page must have reached.
SHOWN = {
    "few_synchronisations": lambda found: int(found["state"].opt_state.rounds) == 2,
    "meshes": lambda found: found["step"].plan is not None,
    "plan": lambda found: found["plan"].verified.peak_bytes <= 10 * 2**20,
    "README": lambda found: found["plan"].verified.peak_bytes <= 32 * 2**20,
}
WITH_CODE = [
    pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow)
    for name, page in PAGES.items()
    if BLOCK.search(page.read_text())
]


@pytest.mark.parametrize("name", WITH_CODE)
def test_every_block_of_a_page_runs(name, tmp_path, monkeypatch):
    if name == "targets" and importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: pip install -e '.[tpu]'")
    monkeypatch.chdir(tmp_path)
    text, found = PAGES[name].read_text(), {}
    for block in BLOCK.finditer(text):
        above = "\n" * text.count("\n", 0, block.start(1))  # lines of a traceback are the page's
        exec(compile(above + block[1], str(PAGES[name]), "exec"), found)
    assert name not in SHOWN or SHOWN[name](found)


def test_readme_is_short():
    lines = PAGES["README"].read_text().splitlines()
    assert len(lines) <= 150 and max(map(len, lines)) <= 100


def test_readme_links_every_page():
    text = PAGES["README"].read_text()
    missing = [name for name in PAGES if f"docs/{name}.md" not in text]
    # These only include a page that has its links: README itself, benchmarks/README.md.
    assert missing == ["README", "index", "measurements"]


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_somewhere(name):
    page = PAGES[name]
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    links = [to for to in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in to]
    for path, _, heading in (to.partition("#") for to in links):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not heading or heading in headings(target.read_text()), f"{path}#{heading}"


def headings(text):
    """Return the anchors that GitHub gives to the headings of a page."""
    words = re.findall(r"^#+ (.*)", text, re.M)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in words}
