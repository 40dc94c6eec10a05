"""The comparison of plans with recomputation by hand on programs of packages of others."""

import json

import pytest

from benchmarks.memory import others
from benchmarks.memory._others.catalogue import NAMES, make, package_of
from benchmarks.memory._others_tables import SLACK, authors_way, tables
from benchmarks.memory._zoo_tables import beating


def row(peak, flops, **more):
    return {"peak": peak * 2**20, "flops": flops, "stated": flops / 1e3, **more}


def plan(peak, flops, budget):
    return row(peak, flops, budget=budget * 2**20, seconds=2.0, compilations=5)


FOUND = {
    "tolerance": 1e-6,
    "by_hand": {
        "nothing": row(100, 1000),
        "each block": row(40, 1300),
        "authors: thrice": row(30, 1500),
        "authors: twice": row(60, 1100),
    },
    "plans": {
        "flops, 0.5": plan(60, 1120, 65),
        "flops, 0.0": plan(35, 1290, 35),
        "flops, each block": plan(40, 1310, 40),
        "flops, authors: thrice": {"error": "BudgetError: no"},
    },
}
REPORT = {"toy": False, "device": "cpu", "jax": "0", "models": {"md_simulation": FOUND}}


def test_the_leanest_way_of_the_authors_is_the_one_to_compare():
    assert authors_way(FOUND["by_hand"]) == "authors: thrice"
    assert authors_way({"nothing": row(1, 1)}) == ""


def test_a_way_by_hand_beats_a_plan_by_more_than_one_per_cent():
    beaten = beating(FOUND, SLACK)
    assert beaten["flops, 0.5"] == ["authors: twice"]
    assert beaten["flops, each block"] == []
    assert beaten["flops, 0.0"] == ["authors: thrice"]


def test_problems_are_what_fails_and_what_is_beaten():
    found = list(others.problems(REPORT))
    assert len(found) == 3 and any("BudgetError" in line for line in found)


def test_a_row_for_each_program_names_its_package():
    table, _ = tables(REPORT)
    assert table.rows[0][0] == "md_simulation (jax_md)"
    assert "authors: twice (0.5)" in table.rows[0][-1] and "failed" in table.rows[0]
    assert "median" in table.note


def test_regrets_are_over_ways_by_hand_and_all_plans_that_fit():
    _, table = tables(REPORT)
    cells = {row[0]: row[2:] for row in table.rows}
    assert table.heads[2:] == ("0.5", "0.0")
    assert cells["flops: FLOPs"] == ("1.018 (1.018)", "1.000 (1.000)")
    assert "other packages" in table.title and table.note.endswith("failed: 1.")


def test_all_programs_have_a_package():
    assert all(package_of(name) for name in NAMES)


@pytest.mark.exhaustive
def test_a_program_at_toy_size(tmp_path):
    out = tmp_path / "others.json"
    command = ["--toy", "--platform", "cpu", "--models", "per_example", "--minimize", "flops"]
    others.main([*command, "--out", str(out)])
    found = json.loads(out.read_text())["models"]["per_example"]
    assert {"flops, 0.5", "flops, 0.0"} <= set(found["plans"])
    assert make("per_example", True).tolerance < 1e-4
