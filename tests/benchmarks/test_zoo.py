"""The comparison of plans with recomputation by hand on the programs of the zoo."""

import json

import pytest

from benchmarks._lib import report as report_files
from benchmarks.memory import zoo
from benchmarks.memory._zoo_tables import beating, regret, regrets, summary
from benchmarks.readme._parts import PARTS
from tests.zoo.catalogue import NAMES, description
from tests.zoo.program import gradient_error


@pytest.mark.exhaustive
def test_a_program_at_toy_size(tmp_path, capsys):
    pytest.importorskip("equinox", reason="the extra `zoo` is not installed")
    out = tmp_path / "zoo.json"
    command = ["--toy", "--platform", "cpu", "--models", "eqx_mlp", "--out", str(out)]
    zoo.main([*command, "--cache", str(tmp_path)])
    found = json.loads(out.read_text())["models"]["eqx_mlp"]
    assert set(found["plans"]) == {f"{aim}, {b}" for aim in ("time", "flops") for b in (0.5,)}
    assert {"nothing", "all under one", "each block", "dots"} <= set(found["by_hand"])
    for row in found["plans"].values():
        assert row["peak"] <= row["budget"] * 1.05 and row["gradients_differ"] < 1e-6
    for row in (*found["plans"].values(), *found["by_hand"].values()):
        assert row["stated"] > 0 and row["kernels"] > 0
    assert found["by_hand"]["nothing"]["barriers"] == 0 < found["by_hand"]["each block"]["barriers"]
    assert "eqx_mlp" in capsys.readouterr().out


def row(peak, flops, **more):
    return {"peak": peak * 10**6, "flops": flops, "predicted_peak": peak * 10**6, **more}


REPORT = {
    "toy": False,
    "device": "cpu",
    "jax": "0",
    "models": {
        "eqx_mlp": {
            "tolerance": 1e-6,
            "by_hand": {
                "nothing": row(100, 1000),
                "each block": row(40, 1300),
                "dots": row(70, 1010),
                "all under one": {"error": "ValueError: no"},
            },
            "plans": {
                "flops, 0.5": row(70, 1020, gradients_differ=0.0, seconds=1.0, compilations=5)
                | {"budget": 75 * 10**6}
                | {"predicted_peak": 70 * 10**6 * 98 // 100},
                "flops, 0.25": {"error": "BudgetError: at least 50"},
                "flops, 0.0": row(50, 1200, gradients_differ=1e-3, seconds=3.0, compilations=2)
                | {"budget": 50 * 10**6, "predicted_peak": 55 * 10**6},
            },
        }
    },
}


def test_ways_that_beat_a_plan_are_named():
    """Fewer FLOPs within its budget, and for the leanest a lower peak at any price."""
    assert beating(REPORT["models"]["eqx_mlp"]) == {
        "flops, 0.5": ["dots"],
        "flops, 0.0": ["each block"],
    }
    assert list(zoo.problems(REPORT)) == [
        "eqx_mlp: flops, 0.25: BudgetError: at least 50",
        "eqx_mlp: flops, 0.0: gradients differ by 1.0e-03",
        "eqx_mlp: flops, 0.5 is beaten by: dots",
        "eqx_mlp: flops, 0.0 is beaten by: each block",
    ]
    program, summary = zoo.tables(REPORT)
    assert program.rows[-1][-1] == "each block" and program.rows[3][-1] == "ValueError: no"
    assert summary.rows == [
        (
            "eqx_mlp", "95.4", "38.1 (1.300)", "66.8 (1.020)", "failed", "47.7 (1.200)",
            "dots (at 0.5), each block (at 0.0)", "An MLP with dropout over a batch",
        )
    ]  # fmt: skip
    assert summary.note == (
        "Predicted against compiled peak of these 2 plans: off by 6.0% (median), 10.0% (worst); a "
        "plan takes 2 s and 3.5 compilations (medians)."
    )
    assert summary.markdown().endswith(f"|\n\n{summary.note}\n")


def test_a_plan_that_leaves_much_of_its_budget_is_beaten_within_the_budget():
    """A way that needs more than the plan and fits the budget counts; one above it does not."""
    by_hand = {"nothing": row(100, 1000), "dots": row(75, 1003), "each block": row(76, 1001)}
    plan = row(57, 1289) | {"budget": 75 * 10**6}
    assert beating({"by_hand": by_hand, "plans": {"flops, 0.5": plan}}) == {"flops, 0.5": ["dots"]}


TIMED = {
    "by_hand": {
        "nothing": row(100, 1000, stated=1.0, kernels=10),
        "dots": row(70, 1010, stated=1.1, kernels=11),
        "each block": row(40, 1300, stated=0.9, kernels=12),
    },
    "plans": {
        "time, 0.5": row(60, 1200, stated=0.99, kernels=15) | {"budget": 75 * 10**6, "seconds": 1},
        "flops, 0.5": row(70, 1010, stated=1.2, kernels=30) | {"budget": 75 * 10**6, "seconds": 1},
    },
}


def test_plans_by_time_are_compared_in_seconds():
    assert beating(TIMED) == {"time, 0.5": ["each block"], "flops, 0.5": []}
    assert regret(TIMED, "time, 0.5", "stated") == pytest.approx(1.1)
    assert regret(TIMED, "time, 0.5", "flops") == pytest.approx(1200 / 1010)
    assert regret(TIMED, "time, 0.25", "flops") is None
    (table,) = regrets(REPORT | {"models": {"eqx_mlp": TIMED}})
    assert table.heads == ("", "programs, at most", "0.5")
    assert table.rows == [
        ("time: seconds", "1", "1.100 (1.100)"),
        ("time: FLOPs", "1", "1.188 (1.188)"),
        ("time: kernels over the baseline's", "1", "1.500 (1.500)"),
        ("flops: seconds", "1", "1.333 (1.333)"),
        ("flops: FLOPs", "1", "1.000 (1.000)"),
        ("flops: kernels over the baseline's", "1", "3.000 (3.000)"),
    ]
    assert regrets(REPORT) == []


def test_a_plan_for_another_budget_may_be_the_best_known():
    leaner = row(40, 1250, stated=0.6, kernels=12) | {"budget": 50 * 10**6, "seconds": 1}
    plans = TIMED["plans"] | {"time, 0.25": leaner, "time, each block": leaner}
    found = TIMED | {"plans": plans}
    assert regret(found, "time, 0.5", "stated") == pytest.approx(0.99 / 0.6)
    assert regret(found, "time, 0.25", "flops") == 1.0
    (table,) = regrets(REPORT | {"models": {"eqx_mlp": TIMED, "mlp": found}}, "other packages")
    assert "programs of other packages" in table.title
    assert table.heads == ("", "programs, at most", "0.5", "0.25")
    assert table.rows[0] == ("time: seconds", "2", "1.375 (1.650)", "1.000 (1.000)")


def test_programs_that_are_not_measured_yet_are_left_out():
    found = REPORT["models"]["eqx_mlp"]
    waiting = {"by_hand": {"nothing": {"error": "ValueError: no"}}, "plans": {}}
    begun = {"by_hand": {"nothing": row(100, 1000)}, "plans": {}}
    models = {"unet": waiting, "densenet": begun, "eqx_mlp": found}
    (table,) = summary(REPORT | {"models": models})
    assert table.rows[0][:7] == ("densenet", "95.4", "-", "-", "-", "-", "-")
    assert [each[0] for each in table.rows] == ["densenet", "eqx_mlp"]
    (table,) = summary(REPORT | {"models": {"densenet": begun}})
    assert not table.note and len(table.heads) == 5


def test_every_program_has_a_description():
    for name in NAMES:
        assert len(description(name)) > 10 and not description(name).endswith("."), name


def test_without_figures_the_part_is_empty(monkeypatch, tmp_path):
    monkeypatch.setattr(report_files, "RESULTS", tmp_path)
    assert PARTS["zoo"]() == ""
    (tmp_path / "zoo.json").write_text(json.dumps(REPORT))
    assert "| eqx_mlp | 95.4 |" in PARTS["zoo"]()


def test_gradients_of_rounding_noise_are_compared_with_the_largest():
    plain = {"w": zoo.jax.numpy.array([4.0, 1.0]), "noise": zoo.jax.numpy.array([1e-7])}
    other = {"w": zoo.jax.numpy.array([4.0, 1.5]), "noise": zoo.jax.numpy.array([3e-7])}
    assert gradient_error(other, plain) == 0.125
    assert gradient_error(plain | {"noise": other["noise"]}, plain) < 1e-6
