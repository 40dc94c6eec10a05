"""Predictions of communication beside those that others published."""

import pytest

from benchmarks.network import published


@pytest.mark.parametrize("name", published.HOURS)
def test_hours_of_a_run_are_those_of_the_paper(name):
    row = published.hours(name, *published.HOURS[name])
    assert row["predicted"] == pytest.approx(row["published"], rel=0.02)
    assert list(published.problems({"hours": {name: row}})) == []


def test_hours_that_are_far_off_are_reported():
    row = {"published": 1.0, "predicted": 1.2}
    assert list(published.problems({"hours": {"x": row}})) == [
        "x: 1.20 hours predicted, 1.0 published"
    ]


def test_a_message_is_as_small_as_that_of_covenant():
    found = published.covenant()
    assert found["predicted_compression"] == pytest.approx(found["compression"], rel=0.01)


def test_the_bandwidth_for_a_share_is_enough_and_little_less_is_not():
    model = published.SIMULATED["1B"][:3]
    found = published.bandwidth_for(0.8, published.DILOCO, *model)
    enough, less = (
        published.way(published.DILOCO, *model, rate * 1e9 / 8) for rate in (found, found / 1.02)
    )
    assert enough.utilisation >= 0.8 > less.utilisation
