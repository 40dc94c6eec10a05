"""Extreme sizes and numbers; x64, vmap and donation around an update."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jrc.dgc import Blocked, dgc_specs, scale_by_dgc
from tests.dgc.replicas import (
    AXIS,
    assert_bit_equal,
    assert_trees_close,
    mesh,
    normal,
    stepper,
    trajectory,
)

PARAMS = {"w": jnp.zeros((3, 67)), "one": jnp.zeros(1), "x": jnp.zeros(400)}
WAYS = {
    "gather": {"exchange": "allgather"},
    "short": {"exchange": "allgather", "wire": "fp8", "selector": "global"},
    "byte": {"exchange": "sharded", "wire": "int8", "selector": Blocked(1)},
    "sharded": {"exchange": "sharded", "selector": Blocked(64)},
}


def flat(tree):
    return np.concatenate([np.asarray(leaf, np.float64).reshape(-1) for leaf in tree.values()])


@pytest.mark.slow(every=True)
@pytest.mark.exhaustive(after=2)
@pytest.mark.parametrize("way", WAYS)
def test_huge_tied_and_vanishing_gradients(way):
    tx = scale_by_dgc(0.5, sparsity=0.9, axis_name=AXIS, min_size=0, **WAYS[way])
    start, step = stepper(tx, PARAMS)
    for value in (0.0, 1.0, 1e38, 1e-38, -3e38):
        gradients = jax.tree.map(lambda p, x=value: jnp.full((4, *p.shape), x), PARAMS)
        updates, state = jax.block_until_ready(step(gradients, start, PARAMS))
        assert not np.isnan(flat(updates)).any()
        for kept in (state.u, state.v):
            assert not any(np.isnan(leaf).any() for leaf in kept.values())
        kept = np.concatenate([np.asarray(v, np.float64).mean(0).ravel() for v in state.v.values()])
        # The sum of four such numbers at an owner overflows float32.
        if abs(value) <= 1 or "allgather" in WAYS[way].values():
            np.testing.assert_allclose(flat(updates) + kept, value, rtol=1e-5, atol=1e-36)
        if value == 1.0:
            assert np.count_nonzero(flat(updates)) == 1 + 20 + 39
        if value == 0.0:
            assert not flat(updates).any() and not kept.any()
    _, state = jax.block_until_ready(step(gradients, state, PARAMS))
    assert not any(np.isnan(v).any() for v in state.v.values())


@pytest.mark.slow(after=1, every=True)
@pytest.mark.exhaustive(after=3)
@pytest.mark.parametrize("way", ["ramp", *WAYS])
def test_float64_switched_on_changes_no_dtype(way):
    ramp = {"sparsity": (0.5, 0.95), "rampup_begin_step": 1, "rampup_step": 4}
    tx = scale_by_dgc(0.9, axis_name=AXIS, min_size=10, **WAYS.get(way, ramp))
    gradients = jax.tree.map(lambda g: g[0], normal(0, PARAMS, 1, 4))
    shapes = []
    for enabled in (False, True):
        with jax.enable_x64(enabled):
            shapes.append(jax.eval_shape(functools.partial(one_step, tx), gradients))
    assert shapes[0] == shapes[1]


def one_step(tx, gradients):
    specs = dgc_specs(jax.eval_shape(tx.init, PARAMS), AXIS)

    def one(gradients):
        return tx.update(jax.tree.map(lambda x: x[0], gradients), tx.init(PARAMS))

    over = functools.partial(jax.shard_map, mesh=mesh(), in_specs=P(AXIS))
    return over(one, out_specs=(P(), specs))(gradients)


@pytest.mark.slow
def test_shard_map_and_pmap_give_the_same():
    tx = scale_by_dgc(0.9, sparsity=0.9, axis_name=AXIS, min_size=10, **WAYS["byte"])
    params = {"w": PARAMS["w"], "one": PARAMS["one"]}
    gradients = normal(1, params, 4, 4)
    path, state = trajectory(tx, params, gradients)
    for via in ("unchecked", "pmap"):
        other, after = trajectory(tx, params, gradients, via)
        assert_trees_close((other, after.v), (path, state.v), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["f32", "bf16", "int8"])
def test_many_runs_at_once_by_vmap(wire):
    tx = scale_by_dgc(0.9, sparsity=0.9, min_size=10, wire=wire, exchange="allgather")
    gradients = jax.tree.map(lambda g: g[0], normal(2, PARAMS, 1, 3))
    states = jax.tree.map(lambda x: jnp.stack([x] * 3), tx.init(PARAMS))
    updates, after = jax.jit(jax.vmap(tx.update))(gradients, states)
    single = jax.jit(tx.update)
    for i in range(3):
        alone = single(jax.tree.map(lambda g, i=i: g[i], gradients), tx.init(PARAMS))
        assert_bit_equal(jax.tree.map(lambda x, i=i: x[i], (updates, after)), alone)


@pytest.mark.slow
def test_a_donated_state_gives_the_same_steps():
    tx = scale_by_dgc(0.9, sparsity=0.9, axis_name=AXIS, min_size=10, exchange="sharded")
    specs = dgc_specs(jax.eval_shape(tx.init, PARAMS), AXIS)
    over = functools.partial(jax.shard_map, mesh=mesh())

    def one(gradients, state):
        return tx.update(jax.tree.map(lambda x: x[0], gradients), state)

    run = over(one, in_specs=(P(AXIS), specs), out_specs=(P(), specs))
    gradients = jax.tree.map(lambda g: g[0], normal(3, PARAMS, 1, 4))
    given = kept = jax.jit(over(tx.init, in_specs=P(), out_specs=specs))(PARAMS)
    keep, give = jax.jit(run), jax.jit(run, donate_argnums=1)
    for _ in range(3):
        expected, kept = jax.block_until_ready(keep(gradients, kept))
        before = jax.tree.map(jnp.copy, kept)
        updates, given = jax.block_until_ready(give(gradients, jax.tree.map(jnp.copy, given)))
        assert_bit_equal((updates, given), (expected, before))


@pytest.mark.slow(after=1, every=True)
@pytest.mark.exhaustive(after=4)
@pytest.mark.parametrize(
    ("size", "sparsity", "count"),
    [(1, 0.0, 1), (1, 0.999999, 1), (7, 0.999999, 1), (101, 0.0, 101), (2, 0.5, 1)],
)
@pytest.mark.parametrize("selector", ["exact", "two_stage", "blocked", "global", "sampled"])
def test_tiny_leaves(selector, size, sparsity, count):
    tx = scale_by_dgc(
        0.0, sparsity=sparsity, min_size=0, selector=selector, wire="bf16", exchange="allgather"
    )
    gradient = jnp.arange(1.0, size + 1)
    updates, state = tx.update(gradient, tx.init(gradient))
    assert np.count_nonzero(updates) == count
    np.testing.assert_array_equal(updates + state.v[0], gradient)
    np.testing.assert_array_equal(np.flatnonzero(updates), np.arange(size - count, size))
