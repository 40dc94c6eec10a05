"""`apply_gradients` against `update` and `optax.apply_updates`."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jrc.dgc import apply_gradients, dgc_momentum, dgc_specs, scale_by_dgc
from tests import draws
from tests.dgc.replicas import AXIS, assert_bit_equal, mesh

PARAMS = {
    "kernel": jnp.linspace(-1.0, 1.0, 2000).reshape(40, 50),
    "half": jnp.linspace(-1.0, 1.0, 1500).astype(jnp.bfloat16),
    "bias": jnp.linspace(0.0, 1.0, 7),
    "small": jnp.ones((2, 3), jnp.bfloat16),
    "count": jnp.arange(3),
    "none": None,
}
FORMS = {
    "gather": {"selector": "global", "wire": "int8", "exchange": "allgather"},
    "sharded": {"exchange": "sharded"},
    "masked": {"exchange": "dense"},
    "switch": {"sparsity": (0.5, 0.95), "rampup_begin_step": 1, "rampup_step": 4},
}


def some_gradients(seed, leading):
    def draw(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.zeros((*leading, *leaf.shape), leaf.dtype)
        return draws.normal(seed + leaf.size, *leading, *leaf.shape).astype(leaf.dtype)

    return jax.tree.map(draw, PARAMS)


def both(tx, apply, replicas=4):
    """One program that takes the same step in both ways; each has a state of its own."""
    specs = dgc_specs(jax.eval_shape(tx.init, PARAMS), AXIS)
    over = functools.partial(jax.shard_map, mesh=mesh(replicas))

    def one(gradients, first, second):
        gradients = jax.tree.map(lambda x: x[0], gradients)
        updates, state = tx.update(gradients, first[1], first[0])
        return (optax.apply_updates(first[0], updates), state), apply(gradients, *second[::-1])

    pair = (P(), specs)
    run = jax.jit(over(one, in_specs=(P(AXIS), pair, pair), out_specs=(pair, pair)))
    state = jax.jit(over(tx.init, in_specs=P(), out_specs=specs))(PARAMS)
    return run, (PARAMS, state)


def assert_same(actual, expected):
    """Within 1e-6; half precision is rounded once in `apply`, and twice in `update`."""

    def check(x, y):
        assert x.dtype == y.dtype and x.shape == y.shape
        tolerance = 0.02 if x.dtype == jnp.bfloat16 else 1e-6
        x, y = (np.asarray(leaf, np.float64) for leaf in (x, y))
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)

    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(check, actual, expected)


@pytest.mark.exhaustive(after=1)
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_apply_is_update_and_apply_updates(form):
    rate = optax.linear_schedule(0.5, 0.1, 6)
    args = {"rampup_begin_step": 0, "sparsity": 0.9} | FORMS[form]
    tx = dgc_momentum(rate, 0.9, axis_name=AXIS, min_size=1000, **args)
    step, start = both(tx, functools.partial(apply_gradients, tx))
    first = second = start
    for seed in range(6):
        gradients = some_gradients(seed, (4,))
        if seed == 4:
            # Nothing changes, the schedule of the learning rate included.
            broken = gradients | {"bias": gradients["bias"].at[2, 0].set(np.nan)}
            _, (params, state) = jax.block_until_ready(step(broken, first, second))
            assert_bit_equal(params, second[0])
            assert_bit_equal(state[1], second[1][1])
            for field in ("step", "u", "v", "velocity"):
                assert_bit_equal(getattr(state[0], field), getattr(second[1][0], field))
            assert int(state[0].skipped) == 1
        first, second = jax.block_until_ready(step(gradients, first, second))
        assert_same(second, first)
        # Both go on from one state: rounding may choose another entry later.
        second = first
    assert_bit_equal(first[0]["count"], PARAMS["count"])
    assert first[0]["none"] is None
    moved = np.asarray(first[0]["kernel"] != PARAMS["kernel"])
    assert moved.any() and np.asarray(first[0]["bias"] != PARAMS["bias"]).all()


@pytest.mark.slow
def test_apply_takes_any_scale():
    tx = scale_by_dgc(0.9, sparsity=0.9, axis_name=AXIS, min_size=1000)

    def apply(gradients, state, params):
        return tx.update.apply(gradients, state, params, 1.0)

    step, start = both(tx, apply)
    first, second = jax.block_until_ready(step(some_gradients(0, (4,)), start, start))
    assert_same(second, first)


@pytest.mark.slow
def test_apply_on_one_replica_without_an_axis():
    tx = dgc_momentum(0.5, 0.9, 0, sparsity=0.75, min_size=0)
    params, gradients = jnp.zeros(4), jnp.array([1.0, -4.0, 2.0, 3.0])
    plain = functools.partial(apply_gradients, tx)
    for apply in (plain, jax.jit(plain, donate_argnums=1)):
        new, state = apply(gradients, tx.init(params), params)
        assert new.tolist() == [0.0, 2.0, 0.0, 0.0]
        assert state[0].v.tolist() == [[1.0, 0.0, 2.0, 3.0]]


@pytest.mark.slow(after=2, every=True)
@pytest.mark.parametrize(
    "wrapped",
    [
        lambda tx: optax.masked(tx, True),
        lambda tx: optax.chain(tx, optax.identity()),
        lambda tx: optax.GradientTransformation(tx.init, lambda *args: tx.update(*args)),
        lambda tx: optax.MultiSteps(tx, 1),
        lambda tx: tx,
    ],
    ids=["masked", "chain", "pair", "every step", "itself"],
)
def test_any_transform_applies_gradients(wrapped):
    tx = wrapped(dgc_momentum(0.5, 0.9, 0, sparsity=0.75, min_size=0))
    params, gradients = jnp.zeros(4), jnp.array([1.0, -4.0, 2.0, 3.0])
    new, _ = apply_gradients(tx, gradients, tx.init(params), params)
    assert new.tolist() == [0.0, 2.0, 0.0, 0.0]


def test_extra_arguments_reach_what_is_inside_of_multi_steps():
    seen = []

    def update(updates, state, params=None, **extra):
        seen.append(extra)
        return updates, state

    one = jnp.ones(2)
    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    tx = optax.MultiSteps(inner, 1)
    apply_gradients(tx, one, tx.init(one), one, param_specs="given")
    assert seen and all(extra == {"param_specs": "given"} for extra in seen)


@pytest.mark.slow
def test_copies_and_replacements():
    tx = scale_by_dgc(0.9, sparsity=0.5, min_size=0)
    params = jnp.zeros(8)
    for same in (copy.copy(tx), tx._replace(init=tx.init), tuple.__new__(type(tx), tx)):
        again, _ = apply_gradients(same, jnp.arange(8.0), tx.init(params), params)
        assert np.flatnonzero(again).tolist() == [4, 5, 6, 7]
    assert type(tx) is optax.GradientTransformationExtraArgs


def test_parameters_that_are_python_numbers():
    tx = scale_by_dgc(0.9, sparsity=0.5, min_size=0)
    state = tx.init({"w": 2.0})
    new, _ = tx.update.apply({"w": jnp.float32(1.0)}, state, {"w": 2.0}, -0.5)
    assert float(new["w"]) == 1.5


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("min_size", [0, 100])
def test_eight_bit_parameters_are_widened_for_the_sum(dtype, min_size):
    tx = dgc_momentum(0.5, 0.9, 0, sparsity=0.75, min_size=min_size)
    params, gradients = jnp.ones(4, dtype), jnp.array([1.0, -4.0, 2.0, 3.0])
    new, _ = apply_gradients(tx, gradients, tx.init(params), params)
    expected = [0.5, 3.0, 0.0, -0.5] if min_size else [1.0, 3.0, 1.0, 1.0]
    assert new.dtype == dtype and new.astype(jnp.float32).tolist() == expected


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_eight_bit_parameters_saturate(dtype):
    tx = dgc_momentum(1.0, 0.9, 0, sparsity=0.75, min_size=0)
    most = jnp.finfo(dtype).max
    params, gradients = jnp.full(4, most), jnp.array([0.0, -(2.0**17), 0.0, 0.0])
    new, _ = apply_gradients(tx, gradients, tx.init(params), params)
    assert (new == most).all() and new.dtype == dtype


def test_eight_bit_parameters_under_regularization():
    decayed = optax.add_decayed_weights(0.5)
    tx = dgc_momentum(1.0, 0.9, 0, sparsity=0.75, min_size=0, regularization=decayed)
    params = jnp.full(4, 2.0, "float8_e4m3fn")
    gradients = jnp.array([0.0, 3.0, 0.0, 0.0])
    new, _ = apply_gradients(tx, gradients, tx.init(params), params)
    assert new.astype(jnp.float32).tolist() == [2.0, -2.0, 2.0, 2.0]


@pytest.mark.parametrize("wrong", [None, {"w": jnp.zeros(3)}])
def test_parameters_that_do_not_fit(wrong):
    tx = dgc_momentum(0.5, 0.9, 0, min_size=0)
    params = {"w": jnp.zeros(4)}
    remedy = r"Call jrc.dgc.apply_gradients\(tx, gradients, state, params\)\."
    with pytest.raises(ValueError, match=f"params must have the structure and shapes .*{remedy}"):
        apply_gradients(tx, params, tx.init(params), wrong)
