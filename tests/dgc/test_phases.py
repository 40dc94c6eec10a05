import jax.numpy as jnp
import pytest

from jrc.dgc import _config
from jrc.dgc._momentum import Decay
from jrc.dgc._phases import (
    phase_at,
    plan_phases,
    ring_all_reduce_bytes,
)
from jrc.dgc._wires import WIRES

FIVE = (0.75, 0.9375, 0.984375, 0.996, 0.999)


def options(sparsity=FIVE, begin=0, ramp=100, exchange="auto"):
    return _config.Options(
        decay=Decay(0.9, False),
        sparsity=sparsity,
        rampup_begin_step=begin,
        rampup_step=ramp,
        local_grad_clip_norm=None,
        num_trainers=None,
        axis_name="data",
        inner_axis=None,
        min_size=0,
        factor_masking=True,
        regularization=None,
        selector=None,
        wire=WIRES["f32"],
        exchange=exchange,
    )


def forms(phases):
    return tuple((phase.start, phase.form) for phase in phases)


def test_auto_is_sparse_only_where_it_sends_less_and_at_the_last_level():
    dense, last = "masked", "gather"
    assert forms(plan_phases([6400], 0, 4, options())) == (
        (0, dense),
        (20, dense),
        (40, dense),
        (60, dense),
        (80, last),
    )
    # 75 % breaks even at 4 replicas, 93.75 % at 16.
    for level, replicas, form in [(0.75, 3, last), (0.75, 4, dense), (0.9375, 15, last)]:
        assert forms(plan_phases([6400], 0, replicas, options((level,)))) == ((0, form),)
    every = plan_phases([6400], 0, 4, options(exchange="allgather"))
    assert [form for _, form in forms(every)] == ["gather"] * 5


@pytest.mark.parametrize("replicas", [2, 3, 4, 8, 64])
def test_auto_never_sends_more_than_a_dense_sum(replicas):
    for phase in plan_phases([5000, 777], 90, replicas, options()):
        assert phase.bytes_sent <= ring_all_reduce_bytes(5867, replicas) * (1 + 1e-9)


def test_forced_exchanges():
    assert {p.form for p in plan_phases([64], 0, 64, options(exchange="allgather"))} == {"gather"}
    assert {p.form for p in plan_phases([64], 0, 2, options(exchange="dense"))} == {"masked"}


def test_dense_phase_stands_first_only_before_a_late_begin():
    late = plan_phases([6400], 10, 4, options((0.999,), begin=5, ramp=1))
    assert forms(late) == ((0, "dense"), (5, "gather"))
    assert late[0].density == 1.0 and late[0].bytes_sent == ring_all_reduce_bytes(6410, 4)
    assert late[1].counts == (6,) and late[1].density == 6 / 6400
    assert forms(plan_phases([6400], 10, 4, options((0.999,), ramp=1))) == ((0, "gather"),)
    assert forms(plan_phases([], 10, 4, options())) == ((0, "dense"),)


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
