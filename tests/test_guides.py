"""Guides in `docs/`: every block of Python runs as it stands, one after another."""

import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).parents[1] / "docs"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["few_synchronisations"])
def test_every_block_of_a_guide_runs(name):
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / f"{name}.md").read_text(), re.M | re.S)
    found = {}
    for block in blocks:
        exec(compile(block, f"{name}.md", "exec"), found)
    assert len(blocks) > 1 and int(found["state"].opt_state.rounds) == 2
