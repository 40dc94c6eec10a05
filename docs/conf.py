"""Configuration of the site: `sphinx-build -W docs docs/build/html`, no network needed.

The pages are those that a code host shows. `index.md`, `measurements.md` and `examples.md` only
include a README that lies elsewhere. The API page has whole docstrings after its tables.
"""

import inspect
import pathlib
import re
import sys

import jrc

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "ext")]
from benchmarks.readme._api import GROUPS  # noqa: E402

project = "jrc"
version = release = jrc.__version__
html_title = f"jrc {version}"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "markdown_docstrings",
    "mathml",
]
exclude_patterns = ["build"]

# Headings have the anchors that code hosts give them.
myst_heading_anchors = 4

# Notebooks are executed at each build; an error in one is an error of the build.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True

autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_use_ivar = True

html_math_renderer = "mathml"
html_theme = "sphinx_book_theme"
html_theme_options = {
    "show_toc_level": 2,
    "home_page_in_toc": True,
    "footer_content_items": [],  # neither author nor copyright
}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False

# A folder whose README.md is included, and the page that includes it.
READMES = {"benchmarks": "measurements", "examples": "examples"}


def link_to_pages(app, path, page, source):
    """Link to the pages that include a README, in README.md too."""
    for folder, target in READMES.items():
        source[0] = source[0].replace(f"](../{folder}/README.md", f"]({target}.md")
        source[0] = source[0].replace(f"]({folder}/README.md", f"](docs/{target}.md")


def prepare(app, page, source):
    """Put the docstrings after the tables of the API."""
    link_to_pages(app, None, page, source)
    text = source[0]
    if page == "api":
        text = re.sub(r"^\| `(\w+)([^`]*)`", r"| {py:obj}`\1\2 <jrc.\1>`", text, flags=re.M)
        text += docstrings()
    source[0] = text


def docstrings():
    """Return directives that document every public name, group by group."""
    parts = []
    for group, names in GROUPS.items():
        parts.append(f"\n## {group}\n\n```{{eval-rst}}\n")
        for name in names:
            kind = "autoclass" if inspect.isclass(getattr(jrc, name)) else "autofunction"
            parts.append(f".. {kind}:: jrc.{name}\n")
            parts.append("   :members:\n\n" if kind == "autoclass" else "\n")
        parts.append("```\n")
    return "".join(parts)


def setup(app):
    """Register the handlers of this configuration."""
    app.connect("source-read", prepare)
    app.connect("include-read", link_to_pages)
