"""The example with split replicas, at toy size."""

import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
def test_split_replicas_learn(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    import train_sharded

    small = ["--steps", "6", "--layers", "1", "--width", "32", "--heads", "2", "--length", "32"]
    found = train_sharded.main([*small, "--budget", "1.0"])
    assert found["losses"][-1] < found["losses"][0]
    assert found["parameter_bytes_on_a_device"] < 0.5 * found["parameter_bytes"]
