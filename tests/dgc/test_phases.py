"""The phases of a run: which exchange from which step on, its counts and its bytes."""

import jax.numpy as jnp
import pytest

from jrc._ring import ring_all_reduce_bytes
from jrc.dgc import AllGather, DenseSum
from jrc.dgc._config import DGCConfig
from jrc.dgc._phases import phase_at, plan_phases

FIVE = (0.75, 0.9375, 0.984375, 0.996, 0.999)


def options(sparsity=FIVE, begin=0, ramp=100, exchange="auto"):
    return DGCConfig(
        sparsity=sparsity,
        rampup_begin_step=begin,
        rampup_step=ramp,
        exchange=exchange,
        axis_name="data",
        min_size=0,
    )


def exchanges(phases):
    return tuple((phase.start, phase.exchange) for phase in phases)


def test_auto_is_sparse_only_where_it_sends_less_and_at_the_last_level():
    dense, last = DenseSum(), AllGather()
    assert exchanges(plan_phases([6400], 0, 4, options())) == (
        (0, dense),
        (20, dense),
        (40, dense),
        (60, dense),
        (80, last),
    )
    # 75 % breaks even at 4 replicas, 93.75 % at 16.
    for level, replicas, best in [(0.75, 3, last), (0.75, 4, dense), (0.9375, 15, last)]:
        assert exchanges(plan_phases([6400], 0, replicas, options((level,)))) == ((0, best),)
    every = plan_phases([6400], 0, 4, options(exchange="allgather"))
    assert [exchange for _, exchange in exchanges(every)] == [last] * 5


@pytest.mark.parametrize("replicas", [2, 3, 4, 8, 64])
def test_auto_never_sends_more_than_a_dense_sum(replicas):
    for phase in plan_phases([5000, 777], 90, replicas, options()):
        assert phase.bytes_sent <= ring_all_reduce_bytes(5867, replicas) * (1 + 1e-9)


@pytest.mark.parametrize(("name", "value"), [("allgather", AllGather()), ("dense", DenseSum())])
def test_an_exchange_by_name_is_its_value_at_every_level(name, value):
    for exchange in (name, value):
        phases = plan_phases([64], 0, 64, options(exchange=exchange))
        assert {phase.exchange for phase in phases} == {value}


def test_the_uncompressed_phase_stands_first_only_before_a_late_begin():
    late = plan_phases([6400], 10, 4, options((0.999,), begin=5, ramp=1))
    assert exchanges(late) == ((0, None), (5, AllGather()))
    assert late[0].density == 1.0 and late[0].bytes_sent == ring_all_reduce_bytes(6410, 4)
    assert late[1].counts == (6,) and late[1].density == 6 / 6400
    at_once = plan_phases([6400], 10, 4, options((0.999,), ramp=1))
    assert exchanges(at_once) == ((0, AllGather()),)
    assert exchanges(plan_phases([], 10, 4, options())) == ((0, None),)


def test_bytes_of_the_rings():
    assert ring_all_reduce_bytes(1000, 4) == 6000
    assert ring_all_reduce_bytes(10, 2) == 40
    assert ring_all_reduce_bytes(1000, 1) == 0
    (only,) = plan_phases([1000], 50, 4, options((0.99,), ramp=1))
    assert only.bytes_sent == 240 + 300


def test_phase_at_every_step():
    phases = plan_phases([6400], 0, 4, options(begin=3, ramp=10))
    found = [int(phase_at(jnp.int32(t), phases)) for t in range(16)]
    assert found == [0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 5, 5, 5]
    assert int(phase_at(jnp.int32(2**31 - 1), phases)) == 5
