"""The convergence benchmark: tiny runs of its tasks, continued runs, and its tables."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks._lib import report as report_files
from benchmarks.convergence import _trainer, train
from benchmarks.convergence._plot import curves, plot
from benchmarks.convergence._tables import brief, difference, judged, tables
from benchmarks.convergence._tasks import TASKS, build, settings_of
from benchmarks.convergence._trainer import METHODS, Method, evaluated, optimizer
from benchmarks.readme._parts import PARTS

SMALL = ["--toy", "--seeds", "1", "--steps", "4", "--methods", "dense_4,dgc_4"]


def without_time(report):
    text = json.dumps(report)
    report = json.loads(text)
    for task in report["tasks"].values():
        for runs in task["runs"].values():
            for run in runs.values():
                del run["seconds"]
    return report


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("convergence") / "convergence.json"
    return train.main([*SMALL, "--tasks", "lstm", "--out", str(out)]), out


@pytest.mark.slow
def test_a_task_trains_and_compresses(trained):
    check_report(*trained, ["lstm"])


@pytest.mark.exhaustive
def test_every_task_trains_and_compresses(tmp_path):
    out = tmp_path / "convergence.json"
    check_report(train.main([*SMALL, "--out", str(out)]), out, list(TASKS))


def check_report(report, out, tasks):
    assert without_time(report) == without_time(json.loads(out.read_text()))
    assert list(report["tasks"]) == tasks
    for task in report["tasks"].values():
        dense, dgc = (task["runs"][name]["0"] for name in ("dense_4", "dgc_4"))
        assert [point["step"] for point in dense["curve"]] == [0, 1, 4]
        # Equal parameters at first, different ones after a step.
        assert dense["curve"][0] == dgc["curve"][0]
        assert dense["curve"][-1]["loss"] != dgc["curve"][-1]["loss"]
        assert dense["bytes_sent"] == pytest.approx(dense["bytes_dense"])
        assert dense["density"] == 1.0 and dense["compressed"] == 0.0
        assert dgc["bytes_dense"] == dense["bytes_dense"] > dgc["bytes_sent"] > 0
        assert dgc["curve"][-1]["bytes"] == dgc["bytes_sent"]
        assert 0 < dgc["density"] < 1 and dgc["norm_kept"] > 0 and dgc["skipped"] == 0
        for run in (dense, dgc):
            assert run["final"][task["metric"]] == run["curve"][-1][task["metric"]]


def test_most_parameters_are_compressed_at_full_size():
    for name in TASKS:
        task = build(name, False, None, None)
        params, _ = jax.eval_shape(task.init, jax.random.key(0))
        least = task.settings["min_size"]
        assert _trainer.compressed_share(params, METHODS["dgc_4"], least) > 0.95


def test_an_interrupted_table_continues_with_the_same_figures(trained, tmp_path):
    report, _ = trained
    part = without_time(report)
    part["tasks"] = {"lstm": part["tasks"]["lstm"]}
    runs = part["tasks"]["lstm"]["runs"]
    del runs["dgc_4"]
    runs["dense_4"]["0"]["mark"] = "not repeated"
    out = tmp_path / "part.json"
    out.write_text(json.dumps(part))
    train.main([*SMALL, "--tasks", "lstm", "--out", str(out)])
    runs = json.loads(out.read_text())["tasks"]["lstm"]["runs"]
    assert runs["dense_4"]["0"]["mark"] == "not repeated"
    again = runs["dgc_4"]["0"] | {"seconds": 0}
    assert again == report["tasks"]["lstm"]["runs"]["dgc_4"]["0"] | {"seconds": 0}


def test_a_file_is_written_after_every_run(tmp_path, monkeypatch):
    out, done = tmp_path / "convergence.json", []

    def run(self, seed, status):
        if done:
            raise KeyboardInterrupt
        done.append(seed)
        return {"seed": seed}

    monkeypatch.setattr(_trainer.Trainer, "run", run)
    with pytest.raises(SystemExit) as stopped:
        train.main([*SMALL, "--tasks", "lstm", "--out", str(out)])
    assert stopped.value.code == 130
    assert json.loads(out.read_text())["tasks"]["lstm"]["runs"] == {"dense_4": {"0": {"seed": 0}}}


def test_other_settings_are_refused(trained):
    _, out = trained
    before = out.read_text()
    with pytest.raises(
        SystemExit, match=r"must have runs of lstm with steps=5.*, got .* with steps=4"
    ):
        train.main([*SMALL, "--tasks", "lstm", "--steps", "5", "--out", str(out)])
    assert out.read_text() == before


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "dgc.json").write_text('{"toy": true}')
    with pytest.raises(SystemExit, match="must name a report of this benchmark, got "):
        train.main([*SMALL, "--tasks", "lstm", "--out", str(tmp_path / "dgc.json")])


@pytest.mark.parametrize("option", ["--tasks", "--methods"])
def test_unknown_names_are_refused(option, capsys):
    with pytest.raises(SystemExit):
        train.main([option, "nothing"])
    assert f"{option}: must be some of d" in capsys.readouterr().err


DENSE = {"0": 2.0, "1": 2.2, "2": 2.1}


@pytest.mark.parametrize(
    "values, higher, text",
    [
        ({"0": 2.1, "1": 2.3}, False, "within"),
        ({"0": 2.0}, True, "within"),
        ({"0": 2.2, "1": 2.5}, False, "0.150 worse"),
        ({"0": 2.2, "1": 2.5}, True, "0.150 better"),
        ({"0": 1.9}, False, "0.100 better"),
        ({"0": 1.9}, True, "0.100 worse"),
        ({"0": 2.1, "1": float("nan")}, False, "diverged"),
    ],
)
def test_a_mean_is_judged_by_the_range_of_dense_seeds(values, higher, text):
    assert judged(values, DENSE, higher) == text


def test_judgement_without_dense_runs_and_in_percent():
    assert judged({"0": 1.0}, {}, False) == "-"
    assert judged({"0": 1.0}, {"0": float("nan")}, False) == "dense diverged"
    assert judged({"0": 0.98}, {"0": 0.99}, True, 100, 2) == "1.00 worse"


def test_a_difference_is_that_of_the_same_seeds_with_its_standard_error():
    # Differences of 3, 1 and 2; a dense seed that the others lack does not count.
    values = {"0": 5.0, "1": 2.0, "2": 6.0}
    assert difference(values, {"0": 2.0, "1": 1.0, "2": 4.0, "3": 9.0}, 1, 3) == "+2.000 ± 0.577"
    assert difference({"0": 0.98}, {"0": 0.99}, 100, 2) == "-1.00"
    assert difference({"0": 1.0}, {}, 1, 3) == "-"
    assert difference(values, {"0": float("inf"), "1": 1.0}, 1, 3) == "-"


def made(final, sent=1e6):
    curve = [
        {"step": 0, "bytes": 0, "loss": 8.0},
        {"step": 8, "bytes": sent / 2, "train_loss": 4.0, "loss": 4.0},
        {"step": 10, "bytes": sent, "train_loss": final - 0.5, "loss": final},
    ]
    return {
        "curve": curve,
        "final": {"loss": final}, "parameters": 100, "bytes_sent": sent, "bytes_dense": 1e6,
        "bytes_last": sent / 10, "density": sent / 1e6, "device": "4 x cpu", "jax": "0.0",
    }  # fmt: skip


@pytest.fixture
def report():
    return {
        "tasks": {
            "gpt": {
                "title": "GPT", "metric": "loss", "higher_is_better": False, "unit": "bits",
                "settings": {"steps": 10, "batch": 8},
                "methods": {
                    name: {"title": method.title, "replicas": method.replicas}
                    for name, method in METHODS.items()
                },
                "runs": {
                    "dense_4": {"0": made(2.0), "1": made(2.5)},
                    "dgc_4": {"0": made(2.25, 2e4), "1": made(2.75, 2e4)},
                    "dgc_8": {"0": made(2.25, 2e4)},
                },
            }
        }
    }  # fmt: skip


def test_the_table_of_a_report(report):
    table, paper = tables(report)
    title, head, rows = table.title, table.heads, table.rows
    assert title.startswith("GPT (100 parameters, 10 steps of 8)") and "range of 2 seeds" in title
    assert "training over the last 20% of the steps" in title
    assert head[2:5] == ("mean", "range", "to dense")
    dense, dgc, eight = rows
    one = "1.750", "-", "1 MB", "100 kB", "100.000%"
    assert dense[1:] == ("4", "2.250", "2.000–2.500", "-", "-", *one)
    assert dgc[2:6] == ("2.500", "2.250–2.750", "+0.250 ± 0.000", "within")
    assert dgc[6:8] == ("2.000", "+0.250 ± 0.000")
    assert dgc[8:] == ("20 kB, 1/50", "2 kB, 1/50", "2.000%")
    # There are no dense runs with as many replicas to judge by.
    assert eight[4:8] == ("-", "-", "1.750", "-")
    for each in (table, paper):
        assert {len(row) for row in each.rows} == {len(each.heads)}


def test_the_table_of_a_run_that_diverged(report):
    report["tasks"]["gpt"]["runs"]["dgc_4"]["1"] = made(float("nan"), 2e4)
    _, dgc, _ = tables(report)[0].rows
    assert dgc[2:5] == ("diverged", "1 of 2", "-") and dgc[5] == "diverged"


def test_no_runs_no_table(report):
    report["tasks"]["gpt"]["runs"] = {}
    assert tables(report) == []


def test_the_readme_has_the_table_and_the_picture(report, tmp_path, monkeypatch):
    monkeypatch.setattr(report_files, "RESULTS", tmp_path)
    assert PARTS["convergence"]() == ""
    (tmp_path / "convergence.json").write_text(json.dumps(report))
    assert "| DGC 99.9 % | 4 | 2.500 |" in PARTS["convergence"]()
    assert "![" not in PARTS["convergence"]()
    (tmp_path / "convergence.png").touch()
    assert "](results/convergence.png)" in PARTS["convergence"]()


def test_a_picture_of_what_has_both_methods(report, tmp_path):
    sent, losses = curves(report["tasks"]["gpt"]["runs"]["dgc_4"])
    assert sent.tolist() == [1e4, 2e4] and losses.tolist() == [[4.0, 2.25], [4.0, 2.75]]
    path = plot(report, tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")
    del report["tasks"]["gpt"]["runs"]["dgc_4"]
    assert plot(report, tmp_path) is None


def test_evaluations_are_closer_at_first_and_include_the_last_step():
    assert sorted(evaluated(100, 5)) == [4, 16, 36, 64, 100]
    assert sorted(evaluated(3, 12)) == [1, 2, 3]


def parameters_after(method):
    """Return the parameters of one replica after twelve random gradients."""
    settings = settings_of("lstm", True, 40)
    alone = None if method.changes is None else {**method.changes, "axis_name": None}
    tx = optimizer(dataclasses.replace(method, replicas=1, changes=alone), settings)

    def step(carry, gradient):
        params, state = carry
        updates, state = tx.update(gradient, state, params)
        return (params + updates, state), None

    zeros = jnp.zeros(2048)
    gradients = jax.random.normal(jax.random.key(0), (12, 2048))
    run = jax.jit(lambda gradients: jax.lax.scan(step, (zeros, tx.init(zeros)), gradients))
    (params, _), _ = run(gradients)
    return np.asarray(params)


@pytest.mark.exhaustive
def test_every_ablation_changes_the_parameters():
    names = [name for name in METHODS if name.endswith("_4")]
    ends = [parameters_after(METHODS[name]) for name in names]
    assert len({end.tobytes() for end in ends}) == len(names) == 10
    assert all(np.isfinite(end).all() for end in ends)


def test_momentum_without_compression_is_that_of_dense():
    """At density 1 the method without momentum correction is momentum SGD."""
    settings = settings_of("lstm", True, 20) | {"clip": None}
    changes = {"axis_name": None, "min_size": 10**6}
    plain = optimizer(Method("", 1, changes, corrected=False), settings)
    rate = optax.warmup_cosine_decay_schedule(0.0, settings["rate"], 1, 20)
    dense = optax.sgd(rate, settings["momentum"])
    params = {"w": jnp.arange(4.0)}
    states = plain.init(params), dense.init(params)
    for i in range(3):
        grads = {"w": jnp.array([1.0, -2.0, 0.5, i])}
        one, first = plain.update(grads, states[0], params)
        two, second = dense.update(grads, states[1], params)
        states = first, second
        np.testing.assert_allclose(one["w"], two["w"], rtol=1e-6)


def test_batches_depend_on_seed_and_step_alone():
    for name in TASKS:
        task = build(name, True, None, None)
        one, two = task.batch_of(3, 5), task.batch_of(3, 5)
        assert all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(two)))
        for other in (task.batch_of(4, 5), task.batch_of(3, 6)):
            assert not np.array_equal(jax.tree.leaves(one)[0], jax.tree.leaves(other)[0])


def test_the_brief_table(report):
    runs = report["tasks"]["gpt"]["runs"]
    assert brief(report).rows == []  # a task without all of its methods has no row
    runs["unmasked_unramped99_4"] = {"0": made(2.0, 5e5)}
    (line,) = brief(report).rows
    assert line == (
        "GPT: bits", "2.250 (2.000–2.500)", "2.500 (2.250–2.750)", "1/50", "2.000 (2.000–2.000)",
        "1/2",
    )  # fmt: skip
