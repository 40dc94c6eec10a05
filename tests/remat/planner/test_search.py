"""The search on fakes: it needs options, what is known of their peaks, and nothing else."""

import dataclasses

import numpy as np
import pytest

from jrc.remat._planner.plan.decision import LeftToJax, Stages
from jrc.remat._planner.search.choose import bytes_of, fitting_option
from jrc.remat._planner.search.compiled_cost import CompiledCost
from jrc.remat._planner.search.search import Search
from jrc.remat._planner.solver.option import Option

OWN = 10


class Fakes:
    """Peaks that are given; each option has a modelled, a predicted and a compiled one.

    `asked` has the options that were compiled, in order.
    """

    own = OWN

    def __init__(self, rows, is_inside=False):
        self.options = [option for option, _, _ in rows]
        self._predicted = {option: predicted for option, predicted, _ in rows}
        self._compiled = {option: compiled for option, _, compiled in rows}
        self.is_inside, self.asked = is_inside, []

    @property
    def baseline(self):
        return next(each for each in self.options if each.is_baseline)

    def modelled(self, option):
        return self.own + option.peak

    def predict(self, options):
        pass

    def predicted(self, option):
        return self._predicted[option]

    def compiled(self, option):
        self.asked.append(option)
        return CompiledCost(0, 0, self._compiled[option], 0)


def way(cost, modelled, compiled, family="solver", predicted=None, name=""):
    """An option with its peaks; that of cost 0 is the baseline."""
    family = family if cost else "baseline"
    option = Option(modelled - OWN, 0, cost, Stages((LeftToJax((cost,)),)), name, family=family)
    return option, modelled if predicted is None else predicted, compiled


def chosen(rows, budget, compilations=5, **options):
    """What the search finds, and what it compiled."""
    fakes = Fakes(rows, **options)
    search = Search(fakes.options, fakes, compilations)
    limit = bytes_of(budget, search, fakes.baseline)
    return fitting_option(search, limit, fakes.baseline), fakes.asked


def drawn(seed, error):
    """Options of falling cost and rising peak, and some with a name; predictions are off."""
    draw = np.random.default_rng(seed)
    count, named = draw.integers(1, 20), draw.integers(0, 8)
    peaks = [*np.sort(draw.integers(100, 1000, count)), *draw.integers(100, 1000, named)]
    costs = [*np.sort(draw.integers(1, 400, count))[::-1], *draw.integers(1, 400, named)]
    costs[count - 1] = 0
    off = np.exp(draw.uniform(-error, error, count + named))
    rows = [
        way(int(c), int(p), int(p * e), *(("regions", None, str(k)) if k >= count else ()))
        for k, (c, p, e) in enumerate(zip(costs, peaks, off, strict=True))
    ]
    return rows, int(draw.integers(100, 1100))


def test_exact_predictions_lead_to_the_cheapest_that_fits_with_one_compilation():
    refused = 0
    for seed in range(300):
        rows, budget = drawn(seed, 0.0)
        fitting = [option for option, _, compiled in rows if compiled <= budget]
        found, asked = chosen(rows, budget, 1)
        if fitting:
            assert found.cost == min(each.cost for each in fitting) and asked == [found]
        else:
            refused += 1
            assert found is None
    assert 0 < refused < 100


@pytest.mark.parametrize("compilations", [1, 2, 3, 5])
def test_wrong_predictions_never_lead_past_the_budget_nor_to_more_compilations(compilations):
    for seed in range(200):
        rows, budget = drawn(seed, 0.4)
        found, asked = chosen(rows, budget, compilations)
        assert len(asked) == len(set(asked))
        peaks = {option: compiled for option, _, compiled in rows}
        fitting = [option for option in asked if peaks[option] <= budget]
        assert found == min(fitting, key=lambda each: each.cost, default=None)
        # Beyond the number only before a refusal: three that may be leanest, and the baseline.
        first = asked[:compilations]
        is_sure = any(peaks[option] <= budget for option in first)
        assert len(asked) <= (compilations if is_sure else compilations + 4)


def test_predictions_alone_decide_without_compilations():
    rows = [way(30, 50, 500), way(20, 90, 900), way(0, 300, 100)]
    found, asked = chosen(rows, 95, 0)
    assert found.cost == 20 and not asked
    found, asked = chosen(rows, 40, 0)
    assert found is None and not asked


def test_a_compiled_peak_corrects_what_is_expected_of_the_others():
    rows = [way(30, 50, 75), way(20, 70, 115), way(10, 90, 155), way(5, 95, 165), way(0, 300, 300)]
    found, asked = chosen(rows, 100, 3)
    # The temporaries of the first are 1.8 times as many as predicted: none is expected to fit any
    # more. The leanest does, by 1.6 times; then 70 is expected at 107, which may fit.
    assert [each.cost for each in asked] == [5, 30, 20] and found.cost == 30


def test_the_error_of_the_baseline_corrects_nothing():
    """XLA recomputes of its own accord there."""
    rows = [way(30, 50, 50), way(20, 90, 90), way(0, 95, 500)]
    found, asked = chosen(rows, 100, 2)
    assert [each.cost for each in asked] == [0, 20] and found.cost == 20


def test_errors_are_those_of_the_own_family():
    """Once one of the own is compiled that is as near; before it the nearest of all counts."""
    rows = [way(30, 80, 80), way(20, 90, 95), way(10, 60, 200, "regions"), way(0, 300, 300)]
    found, asked = chosen(rows, 100, 3)
    assert [each.cost for each in asked] == [10, 30, 20] and found.cost == 20


def test_spare_compilations_go_to_cheaper_options_that_may_fit():
    rows = [way(30, 90, 90), way(16, 106, 99), way(10, 120, 110), way(5, 500, 90), way(0, 600, 600)]
    found, asked = chosen(rows, 100, 5)
    # Halfway in cost between what fits and what does not; 500 is not likely to fit.
    assert [each.cost for each in asked] == [30, 16, 10] and found.cost == 16


def test_the_baseline_comes_first_where_it_fits():
    rows = [way(30, 50, 50), way(0, 100, 100)]
    rows.append((dataclasses.replace(rows[0][0], cost=0), 40, 40))
    found, asked = chosen(rows, 100)
    assert found.is_baseline and asked == [found]


def test_fractions_lie_between_both_ends():
    rows = [way(30, 50, 60), way(20, 70, 85), way(10, 90, 105), way(0, 200, 160)]
    for fraction, cost in ((0.0, 30), (0.3, 20), (0.5, 10), (1.0, 0)):
        found, asked = chosen(rows, fraction)
        assert found.cost == cost and len(asked) <= 5


@pytest.mark.parametrize("peaks", [(10, 40, 30, 50, 20), (30, 40, 10), (30, 20, 10), (5, 5, 5)])
def test_no_fraction_is_refused_whatever_the_peaks(peaks):
    count = len(peaks)
    rows = [way(count - 1 - k, 100 + k, 10 + peak) for k, peak in enumerate(peaks)]
    for eighths in range(9):
        found, _ = chosen(rows, eighths / 8)
        assert found is not None
    assert found.is_baseline


def test_the_leanest_of_each_family_is_compiled_before_a_second_one():
    rows = [way(50, 50, 90), way(40, 52, 92), way(30, 58, 60, "regions"), way(0, 300, 300)]
    found, asked = chosen(rows, 0.0)
    assert found.cost == 30 and [each.cost for each in asked[:3]] == [0, 40, 30]


def test_of_options_that_are_nearly_equally_lean_the_cheapest_is_compiled():
    rows = [way(50, 100, 100), way(20, 105, 95), way(10, 150, 150), way(0, 300, 300)]
    found, asked = chosen(rows, 0.0)
    assert found.cost == 20 and asked[1] == found


@pytest.mark.parametrize("fraction", [False, True])
def test_no_plan_depends_on_other_budgets(fraction):
    """Searches share what is known of peaks, and each behaves as if it were alone."""
    for seed in range(200):
        rows, budget = drawn(seed, 0.3)
        budget = 0.4 if fraction else budget
        alone, _ = chosen(rows, budget)
        shared = Fakes(rows)
        for other in (0.0, 200, 900, budget):
            search = Search(shared.options, shared, 5)
            found = fitting_option(
                search, bytes_of(other, search, shared.baseline), shared.baseline
            )
        assert found == alone


def test_what_a_larger_program_needs_besides_is_that_of_the_first_compiled():
    """Optimizer states and the like are in no prediction."""
    besides = 1000
    rows = [way(30, 50, 50 + besides), way(20, 70, 70 + besides), way(0, 200, 200 + besides)]
    found, asked = chosen(rows, besides + 75, 2, is_inside=True)
    assert found.cost == 20 and len(asked) == 2
