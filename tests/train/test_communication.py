"""The cost model of all ways to exchange, against published figures and what programs send."""

import jax
import pytest

import jrc

BILLION = {"w": jax.ShapeDtypeStruct((25_000, 40_000), "bfloat16")}


def test_streaming_diloco_s_table_at_one_gigabit():
    """1 B parameters in bfloat16, 25 B tokens in steps of 2**20, 0.67 h of computation.

    Two replicas; published: 109 h with dense gradients, 0.88 h with four bits every 100 steps.
    """
    steps = round(25e9 / 2**20)
    advice = jrc.communication_advice(
        BILLION, 2, "1Gbit/s", 0.67 * 3600 / steps, steps=steps, outers=[jrc.DiLoCo(wire="4bit")]
    )
    hours = {way.name: way.total / 3600 for way in advice.ways}
    assert hours["dense"] == pytest.approx(109, rel=0.2)
    assert hours["DiLoCo 4bit"] == pytest.approx(0.88, rel=0.2)


def test_the_first_way_that_keeps_replicas_computing_is_advised():
    params = {"w": jax.ShapeDtypeStruct((5000, 5000), "float32")}
    rates = {"1Tbit/s": "dense", "100Mbit/s": "dgc", "20Mbit/s": "SparseLoCo 2bit"}
    for rate, best in rates.items():
        assert jrc.communication_advice(params, 4, rate, 0.5).best == best
    slow = jrc.communication_advice(params, 4, "1kbit/s", 0.5)
    assert slow.best == min(slow.ways, key=lambda way: way.seconds).name
    assert "every, for 90%" in str(slow)


def test_enough_steps_for_a_utilisation_are_enough_and_no_more():
    params = {"w": jax.ShapeDtypeStruct((5000, 5000), "float32")}
    enough = jrc.communication_advice(params, 4, "100Mbit/s", 0.5).ways[-1].enough
    for every, reached in ((enough, True), (enough - 1, False)):
        advice = jrc.communication_advice(
            params, 4, "100Mbit/s", 0.5, outers=[jrc.DiLoCo(every, wire="4bit")]
        )
        assert (advice.ways[-1].utilisation >= 0.9) == reached


def test_one_replica_waits_for_nothing():
    advice = jrc.communication_advice(BILLION, 1, "1Mbit/s", 1.0, latency=0.1)
    assert advice.best == "dense" and all(way.bytes == 0 for way in advice.ways)
