"""README.md and `docs/`: every block of Python runs as it stands; every link leads somewhere."""

import ast
import importlib.util
import json
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import jrc

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {page.stem: page for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}
# Read on a code host, and included in the site.
FOLDERS = {f"{name}/README": ROOT / name / "README.md" for name in ("benchmarks", "examples")}
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
# The pages that a reader comes to first; the others take longer.
DEFAULT = ("README", "many_processes")
# No two pages are cases of one thing.
EACH = pytest.mark.slow(every=True)
NOTEBOOKS = sorted(ROOT.glob("docs/*.ipynb"))
# What the cells of a notebook must have reached.
LEARNED = {
    "tutorial_budget": lambda found: found["whole"].memory.peak <= 40 * 2**20,
    "tutorial_chip": lambda found: found["plan"].verified.peak_bytes <= found["chip"].budget,
    "tutorial_link": lambda found: (
        found["held_out"](found["state"].params) < 1.2 * found["held_out"](found["dense"].params)
        and found["sent"] < found["sent_dense"] / 100
    ),
}
# What the last block of a page must have reached.
SHOWN = {
    "out_of_memory": lambda found: found["whole"].memory.peak <= 120 * 2**20,
    "low_communication": lambda found: int(found["state"].opt_state.rounds) == 2,
    "meshes": lambda found: not found["info"].synchronised,
    "plan": lambda found: found["plan"].verified.peak_bytes <= 10 * 2**20,
    "README": lambda found: found["plan"].verified.peak_bytes <= 32 * 2**20,
}
WITH_CODE = [
    pytest.param(name, marks=() if name in DEFAULT else EACH)
    for name, page in PAGES.items()
    if BLOCK.search(page.read_text()) and name != "recipes"
]
# Each stands alone: a reader copies one.
RECIPES = {
    section.splitlines()[0]: section
    for section in re.split("^## ", PAGES["recipes"].read_text(), flags=re.M)
    if BLOCK.search(section)
}


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


@EACH
@pytest.mark.parametrize("title", RECIPES)
def test_every_recipe_runs_alone(title):
    (code,) = BLOCK.findall(RECIPES[title])
    if missing := [name for name in imported(code) if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{missing[0]} is not installed: pip install -e '.[zoo,zoo-gemma]'")
    found = {}
    with jax.numpy_rank_promotion("allow"):  # JAX's default, as where a recipe is pasted
        exec(compile(code, f"docs/recipes.md, {title}", "exec"), found)
    if "info" in found:
        assert found["info"].loss > 0 and not found["info"].skipped


@pytest.mark.slow
def test_every_call_of_coming_from_runs(tmp_path, monkeypatch):
    """Whole calls in the second columns, one after the other: `...` is none."""
    monkeypatch.chdir(tmp_path)
    head, _, _ = PAGES["coming_from"].read_text().partition("## Paddle")
    cells = [row.split(" | ", 1)[1] for row in head.splitlines() if row.startswith("| ")]
    spans = [each.replace("\\|", "|") for each in re.findall("`([^`]+)`", " ".join(cells))]
    call = re.compile(r"([\w, ]+ = )?(jrc|jax|plan|report)\.\w+\(.+\)(\(.*\))?")
    calls = [each for each in spans if call.fullmatch(each)]
    assert len(calls) > 30
    found = names_of_coming_from()
    moved = pytest.warns(UserWarning, match="Offload")  # a CPU has one memory
    with jax.numpy_rank_promotion("allow"), moved:
        for call in calls:
            exec(compile(call, f"docs/coming_from.md: {call}", "exec"), found)
            if lean := found.pop("lean", None):
                args = ("w", "x") if "(block" in call else ("params", "batch")
                whole = found["block"] if "(block" in call else found["loss"]
                both = [jax.grad(lambda *a, f=f: jnp.sum(f(*a))) for f in (lean, whole)]
                one, two = (jax.tree.leaves(grad(*(found[arg] for arg in args))) for grad in both)
                for a, b in zip(one, two, strict=True):
                    assert jnp.allclose(a, b, rtol=1e-5)


def names_of_coming_from():
    """What the first lines of the page say of its names."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(x)

    def block(w, x):
        return jnp.tanh(x @ w)

    def loss(params, batch):
        x = batch
        for i, w in enumerate(params):
            x = jrc.mark(block(w, x), f"block_{i}")
        return jnp.mean(jrc.mark(jnp.sin(x), "hidden") ** 2)

    params, batch = [jnp.eye(8) / 2] * 3, jnp.ones((64, 8))
    return {
        "jrc": jrc, "jax": jax, "jnp": jnp, "block": block, "loss": loss, "Block": Block,
        "params": params, "batch": batch, "w": params[0], "x": batch, "xs": batch,
        "f": lambda x: jnp.sum(jnp.tanh(x)), "functions": [jnp.tanh, jnp.sin],
        "loss_fn": lambda params, batch, key: loss(params, batch), "tx": optax.adam(0.1),
        "body": lambda carry, x: (jnp.tanh(carry + x), carry), "carry": jnp.ones(8),
    }  # fmt: skip


@EACH
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_notebook_runs(path, monkeypatch):
    """Its cells in this process, on eight devices: each stands as a reader runs it."""
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    assert not any(c["outputs"] for c in cells)  # none with a path of the machine that ran it
    codes = ["".join(cell["source"]) for cell in cells]
    if "IPython" in imported("\n".join(codes)):
        pytest.importorskip("IPython", reason="pip install -e '.[docs]'")
    monkeypatch.chdir(path.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    found = {}
    with jax.numpy_rank_promotion("allow"):
        for code in codes:
            exec(compile(code, f"docs/{path.name}", "exec"), found)
    if check := LEARNED.get(path.stem):
        assert check(found)


def imported(code):
    """Return the packages that a block imports."""
    nodes = list(ast.walk(ast.parse(code)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    return [name.partition(".")[0] for name in names]


def test_readme_is_short():
    lines = PAGES["README"].read_text().splitlines()
    assert len(lines) <= 150 and max(map(len, lines)) <= 100


def test_readme_links_every_page():
    text = PAGES["README"].read_text()
    missing = [name for name in PAGES if f"docs/{name}.md" not in text]
    # These only include a README, which README.md links: examples/, its own, benchmarks/.
    assert missing == ["README", "examples", "index", "measurements"]
    assert "examples/README.md" in text and "docs/finetune_llm.ipynb" in text


@pytest.mark.parametrize("name", [*PAGES, *FOLDERS])
def test_every_link_leads_somewhere(name):
    page = (PAGES | FOLDERS)[name]
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
