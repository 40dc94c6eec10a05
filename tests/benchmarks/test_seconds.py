"""`benchmarks.memory.seconds`: regrets and ranks of programs whose seconds are given."""

import pytest

from benchmarks.memory.seconds import rank_correlation, regret

PROGRAMS = {
    "nothing": {"peak": 100, "seconds": 4.0, "stated": 3.0},
    "each block": {"peak": 40, "seconds": 3.0, "stated": 2.0},
    "plan, time, 0.5": {"peak": 60, "budget": 70, "seconds": 3.3, "stated": 2.5},
    "plan, time, 1.0": {"peak": 60, "budget": 30, "seconds": 2.0, "stated": 1.0},
}


def test_a_regret_is_over_what_needs_no_more_than_the_budget():
    assert regret(PROGRAMS, "plan, time, 1.0") == 1.0
    assert regret(PROGRAMS, "plan, time, 0.5") == pytest.approx(3.3 / 2.0)


def test_ranks_are_those_of_an_order():
    assert rank_correlation(PROGRAMS) == pytest.approx(1.0)
    turned = PROGRAMS | {"nothing": PROGRAMS["nothing"] | {"stated": 0.1}}
    assert rank_correlation(turned) == pytest.approx(-0.2)
