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
    assert table.rows[2][7] == "-"
    for name in ("adamw", "sparseloco_1"):
        assert runs[name]["bytes_largest"] == pytest.approx(runs[name]["bytes_sent"] / 6)
    before = out.read_text()
    outer.main([*SMALL, "--out", str(out)])
    assert json.loads(out.read_text())["runs"] == json.loads(before)["runs"]
    with pytest.raises(SystemExit):
        outer.main([*SMALL, "--steps", "7", "--out", str(out)])
