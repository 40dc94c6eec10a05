"""The comparison of `recompute_segments` with the same cuts by hand."""

import json

import pytest

from benchmarks.memory import recompute
from tests.examples.runs import run_python


@pytest.mark.exhaustive  # .ci/run runs the toy size, too
def test_segments_are_bit_equal_to_the_same_cuts_by_hand(tmp_path):
    # At this size, with XLA's optimisations, cuts that leave the embedding out are not bit-equal.
    out = tmp_path / "recompute.json"
    command = ("-m", "benchmarks.memory.recompute", "--toy", "--platform", "cpu")
    run_python(*command, "--out", str(out), XLA_FLAGS="")
    report = json.loads(out.read_text())
    assert report["bit_equal_to_hand"] and report["error_to_plain"] < 1e-6
    assert list(recompute.problems(report)) == []


def test_gradients_that_differ_are_reported():
    found = {"bit_equal_to_hand": False, "error_to_plain": 2e-6}
    assert list(recompute.problems(found)) == [
        "the gradients are not bit-equal to those of the same cuts by hand",
        "the gradients differ from the plain ones by 2.0e-06",
    ]


@pytest.mark.parametrize("size", ["0", "-1", "x"])
def test_sizes_are_positive(size, capsys):
    with pytest.raises(SystemExit):
        recompute.main(["--layers", size])
    assert f"must be a whole number >= 1, got {size}." in capsys.readouterr().err
