"""`benchmarks.pytorch.seconds`: processes that answer in turns, and what its tables say."""

import copy

import pytest

from benchmarks._lib.child import Worker
from benchmarks._models.by_hand import EACH
from benchmarks.pytorch import seconds

GIVEN = {"program": "mirrored_mlp", "toy": True, "by_hand": None, "plan": None}


def test_workers_answer_in_turns_and_agree():
    with (
        Worker("pytorch._jax_steps", GIVEN) as plain,
        Worker("pytorch._jax_steps", GIVEN | {"by_hand": EACH}) as lean,
    ):
        answers = [worker.ask() for worker in (plain, lean, plain, lean)]
    assert all(each["seconds"] > 0 and each["resident"] >= 0 for each in answers)
    for what in ("loss", "gradient_norm"):
        assert [each[what] for each in answers] == pytest.approx([answers[0][what]] * 4, rel=1e-5)


def test_a_worker_that_fails_says_why():
    with (
        Worker("pytorch._jax_steps", GIVEN | {"by_hand": "no such way"}) as worker,
        pytest.raises(RuntimeError, match="no such way"),
    ):
        worker.ask()


def row(seconds, size, **more):
    return {"seconds": seconds, "resident": size, "loss": 1.0, "gradient_norm": 2.0, **more}


FOUND = {
    "title": "a net",
    "tolerance": 1e-5,
    "load": 0.5,
    "failed": {},
    "plans": {"PyTorch, eager": "JAX, plan for PyTorch, eager", "PyTorch, compiled": None},
    "ways": {
        "PyTorch, eager": row([2.0, 2.0, 4.0], 3 * 2**20, torch="2.0"),
        "PyTorch, compiled": row([1.0, 1.0, 1.0], 2**20, torch="2.0"),
        "JAX, as written": row([1.0, 1.0, 1.0], 4 * 2**20),
        "JAX, plan for PyTorch, eager": row([1.0, 1.0, 2.0], 2 * 2**20),
    },
}
REPORT = {"models": {"net": FOUND}, "cores": 2, "jax": "0.12", "toy": False}


def test_a_plan_stands_beside_the_way_of_pytorch_that_needs_as_much():
    (table,) = seconds.tables(REPORT)
    rows = {each[0]: each[1:] for each in table.rows}
    assert rows["PyTorch, eager"] == (
        "2.000 (2.000-3.000)", "3", "1.000 (1.000-1.500)", "2", "0.50",
    )  # fmt: skip
    assert rows["PyTorch, compiled"][2] == "none fits"
    assert list(rows) == ["**a net**", "PyTorch, eager", "PyTorch, compiled", "JAX, as written"]
    assert "PyTorch 2.0" in table.title and "load 0.5 to 0.5" in table.title


def test_ways_that_compute_another_gradient_are_problems():
    assert not list(seconds.problems(REPORT))
    other = copy.deepcopy(REPORT)
    other["models"]["net"]["ways"]["PyTorch, eager"]["gradient_norm"] = 2.1
    other["models"]["net"]["failed"]["PyTorch, compiled"] = "no compiler"
    assert list(seconds.problems(other)) == [
        "net: PyTorch, compiled failed: no compiler",
        "net: PyTorch, eager: gradient_norm is 2.1, as written 2.0",
    ]
