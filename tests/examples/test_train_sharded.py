"""The example with split replicas, at toy size; the guide's code as it stands."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
def test_the_guide_runs_as_it_stands():
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/meshes.md").read_text(), re.S)
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 2 and names["step"].plan is not None


@pytest.mark.slow
def test_split_replicas_learn(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    import train_sharded

    small = ["--steps", "6", "--layers", "1", "--width", "32", "--heads", "2", "--length", "32"]
    found = train_sharded.main([*small, "--budget", "1.0"])
    assert found["losses"][-1] < found["losses"][0]
    assert found["parameter_bytes_on_a_device"] < 0.5 * found["parameter_bytes"]
