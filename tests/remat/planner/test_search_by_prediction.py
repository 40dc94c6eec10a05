"""The search that predictions lead: few compilations, the cheapest candidate that fits."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from jrc.remat._planner.search.candidate_peaks import Peaks
from jrc.remat._planner.search.search_by_prediction import cheapest_fitting

import jrc
from jrc.remat._planner.make_plan import Compiler
from jrc.remat._planner.search.problem import PlanningProblem
from jrc.remat._planner.search.search import choose
from tests.remat.planner.test_plan_by_hand import encoder_decoder

pytestmark = pytest.mark.wrong_types


@dataclasses.dataclass(frozen=True)
class Way:
    """A candidate: its cost in FLOPs, and its peaks as predicted and as compiled."""

    cost: int
    predicted: int
    compiled: int
    name: str = ""
    saved = 0

    @property
    def temporaries(self):
        return self.predicted


class Problem:
    """A planning problem whose candidates are given; the last of the row recomputes nothing."""

    given = returned = 10
    is_split, most, few = False, None, ()

    def __init__(self, row, by_hand=()):
        self.candidates, self.all = tuple(row), (*row, *by_hand)
        self.followed = {}

    def cost_order(self, i):
        return self.all[i].cost, self.all[i].predicted

    def follow(self, way):
        return self.followed.setdefault(way, way.predicted)

    def follow_all(self, ways):
        for way in ways:
            self.follow(way)

    def predicted(self, way, followed=()):
        return SimpleNamespace(peak_bytes=way.predicted)


class Led(Problem):
    """A problem as `choose` wants it, whose gradient programs are not what the lines say."""

    is_led_by_predictions, most, compilations = True, 3, 3
    fn, widest = len, "nothing"

    @property
    def leanest(self):
        return range(min(2, len(self.candidates)))

    def predicted(self, way, followed=()):
        if way in followed or way == self.candidates[-1]:
            return SimpleNamespace(peak_bytes=way.predicted)
        return SimpleNamespace(peak_bytes=way.predicted * (2 + way.cost % 3) // 3)

    def plan_of(self, way, budget, memory):
        peak, compiled = SimpleNamespace(peak_bytes=way.compiled), [self.all[i] for i in memory]
        return SimpleNamespace(way=way, compiled=compiled, budget=budget, verified=peak)


def chosen(problem, budget):
    """The plan for a budget, or the leanest one if none fits."""
    compiling = lambda way: SimpleNamespace(peak=way.compiled, outputs=0)  # noqa: E731
    try:
        return choose(problem, budget, compiling, "test")
    except jrc.BudgetError as error:
        return error.plan


def found_by(problem, budget, compilations, found=None):
    compiled = []

    def compiling(way):
        compiled.append(way)
        return SimpleNamespace(peak=way.compiled)

    peaks = Peaks(problem, compiling, "test")
    if found is not None:
        peaks.of(found)
        compiled.clear()
    i = cheapest_fitting(peaks, budget, found, compilations)
    return None if i is None else problem.all[i], compiled


def drawn(seed, error):
    """Candidates of falling cost and rising peak, and ways by hand; predictions are off."""
    draw = np.random.default_rng(seed)
    count, by_hand = draw.integers(1, 20), draw.integers(0, 8)
    peaks = [*np.sort(draw.integers(100, 1000, count)), *draw.integers(100, 1000, by_hand)]
    costs = [*np.sort(draw.integers(1, 400, count))[::-1], *draw.integers(1, 400, by_hand)]
    costs[count - 1] = 0
    off = np.exp(draw.uniform(-error, error, count + by_hand))
    ways = [
        Way(int(c), int(p), int(p * e), f"{k}" if k >= count else "")
        for k, (c, p, e) in enumerate(zip(costs, peaks, off, strict=True))
    ]
    return Problem(ways[:count], ways[count:]), int(draw.integers(100, 1100))


def test_exact_predictions_lead_to_the_cheapest_that_fits_with_one_compilation():
    refused = 0
    for seed in range(300):
        problem, budget = drawn(seed, 0.0)
        fitting = [way for way in problem.all if way.compiled <= budget]
        found, compiled = found_by(problem, budget, 1)
        if fitting:
            assert found.cost == min(way.cost for way in fitting) and found.compiled <= budget
            assert compiled == [found]
        else:
            refused += 1
            assert found is None and not compiled
    assert 0 < refused < 100


@pytest.mark.parametrize("compilations", [1, 2, 3, 5])
def test_wrong_predictions_never_lead_past_the_budget_nor_to_more_compilations(compilations):
    for seed in range(200):
        problem, budget = drawn(seed, 0.4)
        found, compiled = found_by(problem, budget, compilations)
        assert len(compiled) == len(set(compiled)) <= compilations
        fitting = [way for way in compiled if way.compiled <= budget]
        assert found == min(fitting, key=lambda way: way.cost, default=None)


def test_what_fits_is_never_left_for_what_costs_as_much():
    improved = 0
    for seed in range(200):
        problem, budget = drawn(seed, 0.4)
        fitting = [i for i, way in enumerate(problem.all) if way.compiled <= budget]
        if fitting:
            before = problem.all[fitting[-1]]
            found, compiled = found_by(problem, budget, 3, fitting[-1])
            assert found == before or (found.cost < before.cost and found.compiled <= budget)
            assert all(way.cost < before.cost for way in compiled)
            improved += found != before
    assert improved > 20


def test_a_compiled_peak_corrects_the_predictions_of_the_others():
    row = [Way(30, 50, 75), Way(20, 70, 115), Way(10, 90, 155), Way(5, 95, 165), Way(0, 300, 300)]
    found, compiled = found_by(Problem(row), 100, 3)
    # The temporaries of Way(5, 95, ...) are 1.8 times as many as predicted: Way(10, ...) is not
    # expected to fit any more, and after Way(20, ...) the leanest alone is.
    assert [way.cost for way in compiled] == [5, 20, 30] and found == row[0]


def test_a_far_compiled_peak_corrects_nothing():
    """The leanest was compiled, and needs twice what was predicted."""
    row = [Way(30, 20, 30), Way(20, 60, 60), Way(10, 90, 90), Way(0, 300, 300)]
    found, compiled = found_by(Problem(row), 100, 3, found=0)
    assert [way.cost for way in compiled] == [10] and found == row[2]


def test_nothing_recomputed_corrects_nothing():
    row = [Way(30, 50, 50), Way(20, 90, 90), Way(0, 95, 500)]
    found, compiled = found_by(Problem(row), 100, 2)
    assert found == row[1] and [way.cost for way in compiled] == [0, 20]


def test_ways_by_hand_that_nearly_fit_by_their_predictions_are_tried():
    row = [Way(30, 90, 90), Way(20, 103, 99), Way(0, 300, 300)]
    by_hand = [Way(10, 106, 106, "dear"), Way(15, 103, 98, "cheap"), Way(5, 120, 120, "far")]
    found, compiled = found_by(Problem(row, by_hand), 100, 5)
    assert [way.cost for way in compiled] == [30, 10, 15]
    assert found == by_hand[1]


def test_predictions_that_are_all_too_high_lead_to_more_than_the_leanest():
    row = [Way(90, 200, 100), Way(51, 240, 120), Way(21, 280, 140), Way(6, 290, 145)]
    plan = chosen(Led([*row, Way(0, 500, 500)]), 150)
    # Nothing is predicted to fit: of those predicted leanest the cheaper one is compiled first.
    assert [way.cost for way in plan.compiled] == [51] and plan.way == row[1]


@pytest.mark.parametrize("fraction", [False, True])
def test_what_other_budgets_traced_changes_no_plan(fraction):
    for seed in range(200):
        alone, budget = drawn(seed, 0.3)
        count = len(alone.candidates)
        row, by_hand = alone.all[:count], alone.all[count:]
        later = Led(row, by_hand)
        later.follow_all(later.all)
        budget = 0.4 if fraction else budget
        assert chosen(Led(row, by_hand), budget) == chosen(later, budget)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.8])
def test_three_compilations_find_what_is_about_the_cheapest_that_fits(share):
    """All candidates are compiled here, to know which one is."""
    loss, *args = encoder_decoder(lambda layer: layer)
    problem = PlanningProblem.of(loss, tuple(args), 0, False, "test", 3, most=3)
    assert problem.is_led_by_predictions and len(problem.candidates) > 6
    compiled = Compiler(problem)
    peaks = [compiled(way).peak for way in problem.all]
    budget = int(min(peaks) + share * (peaks[len(problem.candidates) - 1] - min(peaks)))
    plan = choose(problem, budget, compiled, "test")
    assert plan.verified.peak_bytes <= budget and plan.compilations <= 3
    fitting = [way for way, peak in zip(problem.all, peaks, strict=True) if peak <= budget]
    least = min(way.recomputed for way in fitting)
    assert plan.verified.flops <= 1.01 * (problem.flops + least)
