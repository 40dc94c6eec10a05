"""The benchmark of outer optimizers: tiny runs, continued, and their table."""

import json

import jax
import pytest

import jrc
from benchmarks.convergence import _outer_clock, outer, rates

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
    table, _ = outer.tables(report)
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
    table, _ = outer.tables(report)
    assert [row[1] for row in table.rows] == ["2", "2", "1", "1"]
    assert [row[4] for row in table.rows] == ["-", "+5.0% (+0.0% to +10.0%)", "-25.0%", "-"]
    assert [row[8] for row in table.rows] == ["1 x", "1,000 x", "2,000 x", "2,000 x"]
    assert (
        outer.plot(report, tmp_path) is None and outer.plot(report | {"runs": {}}, tmp_path) is None
    )
    del runs["dgc"]
    picture = outer.plot(report, tmp_path)
    assert picture is not None and picture.stat().st_size > 10_000
    assert (tmp_path / "outer_time.png").stat().st_size > 10_000


def test_runs_on_other_replicas_have_rows_and_tables_of_their_own(tmp_path):
    runs = {
        "adamw": {"0": run_that_ends(2.0, 1e9)},
        "adamw, 8 replicas": {"0": run_that_ends(4.0, 2e9)},
        "sparseloco_5, 8 replicas": {"0": run_that_ends(4.2, 1e6)},
    }
    settings = {"steps": 8, "batch": 4, "length": 2}
    report = {"runs": runs, "settings": settings, "title": "GPT", "unit": "bits"}
    four, eight, *clocks = outer.tables(report)
    assert "on 4 replicas" in four.title and "on 8 replicas" in eight.title
    assert [row[4] for row in eight.rows] == ["-", "+5.0%"] and len(four.rows) == 1
    assert [len(clock.rows) for clock in clocks] == [1, 2]
    assert outer.plot(report, tmp_path) is not None
    assert outer.run_name("adamw", 4) == "adamw"
    for wrong in ("3", "16", "x"):
        with pytest.raises(SystemExit):
            outer.BENCHMARK.parse(["--replicas", wrong])


def test_time_is_computation_and_the_bytes_that_were_recorded():
    """As `jrc.communication_advice` says it for the same bytes."""
    params = jax.ShapeDtypeStruct((137_216,), "float32")
    run = {"curve": [{"step": 15, "rounds": 0, "bytes": 0.0, "loss": 4.0},
                     {"step": 30, "rounds": 1, "bytes": 0.0, "loss": 2.0}]}  # fmt: skip
    for method in ("diloco_30", "diloco_30_overlap"):
        outers = [outer.METHODS[method].outer]
        for link in _outer_clock.LINKS:
            step_time = _outer_clock.STEP_TIME
            way = jrc.communication_advice(params, 4, link, step_time, outers=outers).ways[-1]
            run["curve"][1]["bytes"] = way.bytes
            seconds = _outer_clock.seconds_at(method, run, link)
            assert seconds[0] == pytest.approx(15 * step_time)
            assert seconds[1] == pytest.approx(30 * way.seconds)


def test_the_time_to_be_near_dense_lies_on_the_curve():
    dense = {"0": run_that_ends(2.0, 0.0)}
    falling = run_that_ends(2.0, 0.0)
    falling["curve"][0]["loss"] = 4.0
    methods = {"adamw": dense, "sparseloco_5": {"0": falling}, "dgc": {"0": run_that_ends(3.0, 0)}}
    table = _outer_clock.clock_table(4, methods, {"title": "GPT"})
    # 1.96 of the way down to 2.0 from 4.0, between 40 and 80 ms.
    assert [row[4] for row in table.rows] == ["40 ms", "79.2 ms", "-"]


def run_over(losses, rounds, sent):
    """A run with a point every two steps."""
    points = [
        {"step": 2 * i, "rounds": rounds * i // len(losses), "bytes": sent * i / len(losses)}
        for i in range(1, len(losses) + 1)
    ]
    curve = [{**point, "loss": loss} for point, loss in zip(points, losses, strict=True)]
    return {"curve": curve, "seconds": 1.0}


def test_methods_are_compared_with_dense_each_at_its_best_rate():
    runs = {
        "adamw": {
            "0.003": {"0": run_over([4.0, 3.0], 4, 4e6)},
            "0.006": {"0": run_over([3.0, 2.0], 4, 4e6), "1": run_over([3.0, 2.2], 4, 4e6)},
        },
        "sparseloco_15": {
            "0.003": {"0": run_over([3.0, 2.5], 2, 1e3), "1": run_over([3.0, 2.75], 2, 1e3)},
            "0.006": {"0": run_over([3.0, 2.75], 2, 1e3)},
        },
        "snoo_15": {"0.003": {"0": run_over([3.0, 1.9], 2, 0.0)}},
    }
    report = {"runs": runs, "title": "GPT", "unit": "bits", "settings": {"steps": 4}}
    losses, clock, to_loss = rates.tables(report)
    assert losses.rows[0][1:] == ("3.000 (1)", "2.100 (2)", "0.006", "-")
    assert losses.rows[1][1:] == ("2.625 (2)", "2.750 (1)", "0.003", "+25.0% (+25.0% to +25.0%)")
    assert losses.rows[2][1:] == ("1.900 (1)", "", "0.003", "-5.0%")
    assert [row[0] for row in clock.rows] == [losses.rows[i][0] for i in (0, 1)]
    # Dense sends 4 MB in 4 exchanges, 0.32 s over 100 Mbit/s, and computes for 0.04 s: of these
    # 0.36 s it has taken half at a loss of 3, and all of it at 2.1; 2.625 is 0.417 of the way.
    (row,) = to_loss.rows
    assert row[1] == "2.625" and row[5:] == ("40.08 ms", "255 ms", "6.4 x")


def test_dense_that_never_gets_there_has_no_time():
    runs = {
        "adamw": {"0.003": {"0": run_over([4.0, 3.0], 4, 4e6)}},
        "diloco_15": {"0.003": {"0": run_over([3.0, 2.5], 2, 1e3)}},
    }
    report = {"runs": runs, "title": "GPT", "unit": "bits", "settings": {"steps": 4}}
    assert rates.tables(report)[2].rows[0][3:5] == ("-", "-")


def test_a_rate_that_diverged_is_not_the_best():
    nan = run_over([4.0, float("nan")], 4, 4e6)
    assert rates.best_rate({"0.012": {"0": nan}, "0.003": {"0": run_over([4.0, 3.0], 4, 4e6)}}) == (
        "0.003"
    )


@pytest.mark.exhaustive  # .ci/run runs the toy size, too
def test_rates_are_continued_with_the_same_settings(tmp_path):
    out = tmp_path / "rates.json"
    asked = ["--toy", "--methods", "snoo_15", "--rates", "0.003", "--out", str(out)]
    report = rates.main(asked)
    (run,) = report["runs"]["snoo_15"]["0.003"].values()
    assert run["replicas"] == 1 and run["bytes_sent"] == 0
    assert report["settings"]["layers"] == 1
    before = json.loads(out.read_text())
    rates.main(asked)
    assert json.loads(out.read_text())["runs"] == before["runs"]
    rates.main([*asked, "--rates", "0.006"])
    assert list(json.loads(out.read_text())["runs"]["snoo_15"]) == ["0.003", "0.006"]
    with pytest.raises(SystemExit, match="other settings"):
        rates.main([*asked, "--layers", "3"])
