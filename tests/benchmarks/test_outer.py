"""The benchmark of outer optimizers: tiny runs, continued, and their table."""

import json

import pytest

from benchmarks.convergence import outer

SMALL = ["--toy", "--methods", "adamw,sparseloco_1,diloco_15"]


@pytest.mark.exhaustive  # .ci/run runs the toy size, too
def test_runs_are_counted_and_not_repeated(tmp_path):
    out = tmp_path / "outer.json"
    report = outer.main([*SMALL, "--out", str(out)])
    runs = {name: seeds["0"] for name, seeds in report["runs"].items()}
    assert [run["rounds"] for run in runs.values()] == [6, 6, 0]
    assert [point["step"] for point in runs["adamw"]["curve"]] == [2, 6]
    assert runs["adamw"]["bytes_sent"] == pytest.approx(runs["adamw"]["bytes_dense"])
    assert 0 < runs["sparseloco_1"]["bytes_sent"] < runs["adamw"]["bytes_sent"] / 20
    (table,) = outer.tables(report)
    assert [row[0] for row in table.rows] == [outer.METHODS[name].title for name in runs]
    assert table.rows[2][8] == "-"
    for name in ("adamw", "sparseloco_1"):
        assert runs[name]["bytes_largest"] == pytest.approx(runs[name]["bytes_sent"] / 6)
    before = out.read_text()
    outer.main([*SMALL, "--out", str(out)])
    assert json.loads(out.read_text())["runs"] == json.loads(before)["runs"]
    with pytest.raises(SystemExit):
        outer.main([*SMALL, "--steps", "7", "--out", str(out)])


def run_that_ends(loss, sent):
    """A run as `outer.json` has it, with one evaluation."""
    point = {"step": 8, "rounds": 8, "bytes": sent, "train_loss": loss, "loss": loss}
    curve = [{**point, "step": 4, "bytes": sent / 2}, point]
    figures = {"rounds": 8, "bytes_sent": sent, "bytes_dense": 1e9, "parameters": 10}
    return figures | {"curve": curve, "seconds": 1.0}


def test_methods_are_compared_with_dense_of_the_same_seeds(tmp_path):
    runs = {
        "adamw": {"0": run_that_ends(2.0, 1e9), "1": run_that_ends(4.0, 1e9)},
        "sparseloco_5": {"0": run_that_ends(2.2, 1e6), "1": run_that_ends(4.0, 1e6)},
        "sparseloco_15": {"1": run_that_ends(3.0, 5e5)},
        "dgc": {"7": run_that_ends(3.0, 5e5)},
    }
    settings = {"steps": 8, "batch": 4, "length": 2}
    report = {"runs": runs, "settings": settings, "title": "GPT", "unit": "bits"}
    (table,) = outer.tables(report)
    assert [row[1] for row in table.rows] == ["2", "2", "1", "1"]
    assert [row[4] for row in table.rows] == ["-", "+5.0% (+0.0% to +10.0%)", "-25.0%", "-"]
    assert [row[8] for row in table.rows] == ["1 x", "1,000 x", "2,000 x", "2,000 x"]
    assert (
        outer.plot(report, tmp_path) is None and outer.plot(report | {"runs": {}}, tmp_path) is None
    )
    del runs["dgc"]
    picture = outer.plot(report, tmp_path)
    assert picture is not None and picture.stat().st_size > 10_000
