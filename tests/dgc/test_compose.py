"""Inside optax chains, masks, injected hyperparameters, schedules and accumulation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jrc.dgc import DGCState, dgc_momentum, dgc_specs, dgc_stats, scale_by_dgc
from tests.dgc.replicas import (
    AXIS,
    assert_bit_equal,
    assert_trees_close,
    descend,
    normal,
    some_params,
    trajectory,
)

PARAMS = {"w": jnp.ones((20, 10)), "b": jnp.ones(3), "n": jnp.arange(2)}
FLOATS = {"w": jnp.ones((20, 10)), "b": jnp.ones(3)}
ARGS = {"sparsity": 0.9, "axis_name": AXIS, "min_size": 100}


def ranked(path):
    return jax.tree.map(lambda x: x[:, 0], path)


@pytest.mark.slow
def test_schedule_and_injected_rate_are_the_plain_optimizer():
    gradients = normal(0, FLOATS, 8, 4)
    plain, state = trajectory(dgc_momentum(0.1, 0.9, 0, **ARGS), FLOATS, gradients)

    scheduled = dgc_momentum(optax.constant_schedule(0.1), 0.9, 0, **ARGS)
    assert_bit_equal(trajectory(scheduled, FLOATS, gradients)[0], plain)

    static = ("rampup_begin_step", "rampup_step", "min_size", "sparsity")
    injected = optax.inject_hyperparams(dgc_momentum, static_args=static)(0.1, 0.9, 0, **ARGS)
    path, inner = trajectory(injected, FLOATS, gradients)
    assert_trees_close(path, plain, 1e-6)
    assert_trees_close(dgc_stats(inner)._asdict(), dgc_stats(state)._asdict(), 1e-5)
    assert set(inner.hyperparams) == {"learning_rate", "momentum"}


def test_chain_after_local_transforms_and_before_adam():
    gradients = normal(1, FLOATS, 8, 4)
    tx = optax.chain(
        optax.clip(1.0), scale_by_dgc(0.0, **ARGS), optax.scale_by_adam(), optax.scale(-0.1)
    )
    path, state = trajectory(tx, FLOATS, gradients)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(path))
    assert isinstance(state[1], DGCState) and int(state[1].step) == 8


@pytest.mark.slow
def test_regularization_by_a_transform_is_the_number():
    gradients = normal(2, FLOATS, 8, 4)
    decay = optax.add_decayed_weights(0.01)
    number, other = (
        trajectory(dgc_momentum(0.1, 0.9, 0, regularization=how, **ARGS), FLOATS, gradients)[0]
        for how in (0.01, decay)
    )
    chained = optax.chain(decay, dgc_momentum(0.1, 0.9, 0, **ARGS))
    assert_trees_close(other, number, 1e-6)
    assert_trees_close(trajectory(chained, FLOATS, gradients)[0], number, 1e-6)


@pytest.mark.slow
def test_masked_leaves_do_not_change():
    mask = {"w": True, "b": False}
    tx = optax.masked(scale_by_dgc(0.9, **ARGS), mask)
    frozen = optax.chain(tx, optax.masked(optax.set_to_zero(), {"w": False, "b": True}))
    # optax.masked returns a masked leaf's local gradient, so varying types are not checked here.
    path, state = trajectory(frozen, FLOATS, normal(3, FLOATS, 4, 4), "unchecked")
    assert (path["b"] == 1).all() and not (path["w"] == 1).all()
    assert isinstance(dgc_stats_state(state).u["b"], optax.MaskedNode)
    assert isinstance(dgc_stats_state(state).velocity["b"], optax.MaskedNode)


def dgc_stats_state(tree):
    found = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, DGCState))
    return next(node for node in found if isinstance(node, DGCState))


@pytest.mark.slow
def test_multi_steps_on_one_replica_is_the_mean_of_its_parts():
    gradients = jax.tree.map(lambda g: g[:, 0], normal(4, FLOATS, 6, 1))
    tx = dgc_momentum(0.1, 0.9, 0, sparsity=0.9, min_size=100)
    path, state = jax.jit(lambda g: descend(optax.MultiSteps(tx, 2), FLOATS, g))(gradients)
    halves = jax.tree.map(lambda g: g.reshape(3, 2, *g.shape[1:]).mean(1), gradients)
    whole, _ = jax.jit(lambda g: descend(tx, FLOATS, g))(halves)
    assert_trees_close(jax.tree.map(lambda x: x[1::2], path), whole, 1e-6)
    assert int(dgc_stats_state(state).step) == 3


@pytest.mark.slow(every=True)
@pytest.mark.exhaustive(after=2)
@pytest.mark.parametrize("via", ["unchecked", "pmap"])
def test_multi_steps_on_replicas(via):
    gradients = normal(5, FLOATS, 6, 4)
    tx = dgc_momentum(0.1, 0.9, 0, **ARGS)
    path, _ = trajectory(optax.MultiSteps(tx, 2), FLOATS, gradients, via)
    halves = jax.tree.map(lambda g: g.reshape(3, 2, *g.shape[1:]).mean(1), gradients)
    whole, _ = trajectory(tx, FLOATS, halves)
    assert_trees_close(jax.tree.map(lambda x: x[1::2], path), whole, 1e-6)


@pytest.mark.slow(every=True)
@pytest.mark.exhaustive(after=2)
@pytest.mark.parametrize("sparsity", [0.0, 0.99])
def test_bfloat16_parameters_under_a_ramp(sparsity):
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), some_params())
    tx = dgc_momentum(
        0.1, 0.9, 2, 4, (0.0, sparsity), axis_name=AXIS, min_size=1000, regularization=1e-3
    )
    path, _ = trajectory(tx, params, normal(6, params, 8, 4))
    assert {leaf.dtype for leaf in jax.tree.leaves(path)} == {jnp.dtype("bfloat16")}


@pytest.mark.slow
def test_inside_apply_if_finite():
    tx = optax.apply_if_finite(dgc_momentum(0.1, 0.9, 0, sparsity=0.9, min_size=100), 3)
    updates, state = tx.update(FLOATS | {"b": FLOATS["b"] * np.nan}, tx.init(FLOATS), FLOATS)
    assert not jnp.any(updates["w"]) and int(state.total_notfinite) == 1
    assert int(dgc_stats_state(state).step) == 0


def wrapped(wrap):
    return wrap(dgc_momentum(0.1, 0.9, 0, **ARGS))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: tx,
        lambda tx: optax.chain(optax.clip(1.0), tx),
        lambda tx: optax.masked(tx, {"w": True, "b": True, "n": False}),
        lambda tx: optax.MultiSteps(tx, 2),
        lambda tx: optax.inject_hyperparams(lambda learning_rate: tx)(0.1),
    ],
)
def test_specs_have_the_tree_of_any_state(wrap):
    tx = wrapped(wrap)
    state = {"opt": tx.init(PARAMS), "params": PARAMS, "step": 0}
    specs = dgc_specs(state, AXIS)
    assert jax.tree.structure(specs) == jax.tree.structure(state)
    assert set(jax.tree.leaves(specs)) == {P(), P(AXIS)}
    inner = dgc_stats_state(specs)
    assert (inner.u["w"], inner.v["w"], inner.velocity["b"]) == (P(AXIS), P(AXIS), P())
    assert jax.tree.leaves(specs["params"]) == [P()] * 3
    assert jax.tree.leaves(dgc_specs(jax.eval_shape(lambda: state), AXIS)) == jax.tree.leaves(specs)


def test_specs_of_gradients_that_multi_steps_accumulates():
    tx = optax.MultiSteps(dgc_momentum(0.1, 0.9, 0, **ARGS), 2)
    params = PARAMS | {"scalar": jnp.float32(1)}
    specs = dgc_specs(tx.init(params), AXIS)
    assert specs.acc_grads == {"w": P(AXIS), "b": P(AXIS), "n": P(AXIS), "scalar": P()}
    plain = dgc_specs(optax.MultiSteps(optax.sgd(0.1, 0.9), 2).init(PARAMS), AXIS)
    assert set(jax.tree.leaves(plain)) == {P()}


@pytest.mark.slow
def test_stats_inside_any_state():
    tx = dgc_momentum(0.1, 0.9, 0, sparsity=0.75, min_size=100)
    gradient = {"w": jnp.full((20, 10), 2.0), "b": jnp.ones(3)}
    _, state = tx.update(gradient, tx.init(FLOATS), FLOATS)
    stats = dgc_stats({"deep": [state]})
    assert float(stats.density) == 0.25 and float(stats.bytes_sent) == 0
    np.testing.assert_allclose(stats.norm_kept, 2 * np.sqrt(150), rtol=1e-6)
    assert int(stats.skipped) == 0 and float(stats.bytes_received) == float(stats.bytes_sent)
