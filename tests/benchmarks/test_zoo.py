"""The comparison of plans with recomputation by hand on the programs of the zoo."""

import json

import pytest

from benchmarks.memory import zoo
from benchmarks.memory._zoo_tables import beating
from tests.zoo.program import gradient_error

pytest.importorskip("equinox", reason="the extra `zoo` is not installed")


@pytest.mark.exhaustive
def test_a_program_at_toy_size(tmp_path, capsys):
    out = tmp_path / "zoo.json"
    command = ["--toy", "--platform", "cpu", "--models", "eqx_mlp", "--out", str(out)]
    zoo.main([*command, "--cache", str(tmp_path)])
    found = json.loads(out.read_text())["models"]["eqx_mlp"]
    assert set(found["plans"]) == {"0.5", "0.0"}
    assert {"nothing", "all under one", "each block", "dots"} <= set(found["by_hand"])
    for row in found["plans"].values():
        assert row["peak"] <= row["budget"] * 1.05 and row["gradients_differ"] < 1e-6
    assert "eqx_mlp" in capsys.readouterr().out


def row(peak, flops, **more):
    return {"peak": peak, "flops": flops, "predicted_peak": peak, **more}


REPORT = {
    "toy": False,
    "device": "cpu",
    "jax": "0",
    "models": {
        "net": {
            "tolerance": 1e-6,
            "by_hand": {
                "nothing": row(100, 1000),
                "each block": row(40, 1300),
                "dots": row(70, 1010),
                "all under one": {"error": "ValueError: no"},
            },
            "plans": {
                "0.5": row(70, 1020, gradients_differ=0.0, seconds=1.0, compilations=5),
                "0.25": {"error": "BudgetError: at least 50"},
                "0.0": row(50, 1200, gradients_differ=1e-3, seconds=1.0, compilations=2),
            },
        }
    },
}


def test_ways_that_beat_a_plan_are_named():
    """Fewer FLOPs within its peak, and for the leanest a lower peak at any price."""
    assert beating(REPORT["models"]["net"]) == {"0.5": ["dots"], "0.0": ["each block"]}
    assert list(zoo.problems(REPORT)) == [
        "net: budget 0.25: BudgetError: at least 50",
        "net: budget 0.0: gradients differ by 1.0e-03",
        "net: budget 0.5 is beaten by: dots",
        "net: budget 0.0 is beaten by: each block",
    ]
    programs, summary = zoo.tables(REPORT)
    assert programs.rows[-1][-1] == "each block" and programs.rows[3][-1] == "ValueError: no"
    assert summary.rows == [
        ("net", "0.00", "0.00", "0.00", "failed", "0.00", "1.020", "-", "1.200", "2")
    ]


def test_gradients_of_rounding_noise_are_compared_with_the_largest():
    plain = {"w": zoo.jax.numpy.array([4.0, 1.0]), "noise": zoo.jax.numpy.array([1e-7])}
    other = {"w": zoo.jax.numpy.array([4.0, 1.5]), "noise": zoo.jax.numpy.array([3e-7])}
    assert gradient_error(other, plain) == 0.125
    assert gradient_error(plain | {"noise": other["noise"]}, plain) < 1e-6
