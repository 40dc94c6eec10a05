"""One table for all optax transforms of this library: what optax and its users rely on."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jrc
from tests.draws import normal

scale = functools.partial(jrc.scale_by_dgc, sparsity=0.75, min_size=8)
momentum = functools.partial(jrc.dgc_momentum, 0.1, 0.9, min_size=8)

TRANSFORMS = {
    "scale_by_dgc": scale(),
    "nesterov": scale(use_nesterov=True),
    "clip and L2": scale(local_grad_clip_norm=0.5, regularization=1e-3),
    "no masking": scale(factor_masking=False),
    "dense exchange": scale(exchange="dense"),
    "ramp": scale(sparsity=(0.5, 0.75, 0.9), rampup_begin_step=2, rampup_step=4),
    "all leaves": scale(min_size=0),
    "no leaf": scale(min_size=10**9),
    "dgc_momentum": momentum(0),
    "dgc_momentum ramp": momentum(3, 4, (0.5, 0.9)),
    "schedule": jrc.dgc_momentum(optax.linear_schedule(0.1, 0.0, 10), 0.9, 0, min_size=8),
    "chained": optax.chain(
        optax.clip(1.0), scale(), optax.add_decayed_weights(1e-3), optax.scale(-0.1)
    ),
    "injected": optax.inject_hyperparams(
        jrc.dgc_momentum, static_args=("rampup_begin_step", "rampup_step", "min_size", "sparsity")
    )(learning_rate=0.1, momentum=0.9, rampup_begin_step=0, min_size=8),
    "scale_by_ef21": jrc.scale_by_ef21(0.5, sparsity=0.75, min_size=8),
    "ef21 and adam": optax.chain(
        jrc.scale_by_ef21(jnp.float32(0.1), sparsity=0.75, min_size=8), optax.scale_by_adam(b1=0.0)
    ),
    "every second": optax.MultiSteps(scale(), 2),
}  # fmt: skip
table = pytest.mark.parametrize("name", TRANSFORMS)

PARAMS = {
    "w": jnp.linspace(-1.0, 1.0, 40).reshape(5, 8),
    "half": jnp.linspace(0.0, 1.0, 12, dtype=jnp.bfloat16),
    "b": jnp.ones(3),
    "scalar": jnp.float32(2.0),
    "none": None,
}


NOISE = jax.tree.map(lambda x: normal(x.size, 8, *x.shape), PARAMS)


def gradients(t):
    return jax.tree.map(lambda noise, x: noise[t].astype(x.dtype), NOISE, PARAMS)


def avals(tree):
    return jax.tree.map(lambda x: (x.shape, str(x.dtype), jax.typeof(x).weak_type), tree)


def run(tx, steps, update=None):
    params, state = PARAMS, tx.init(PARAMS)
    for t in range(steps):
        updates, state = (update or tx.update)(gradients(t), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.exhaustive(after=8)
@pytest.mark.slow(after=2)
@table
def test_updates_are_like_the_parameters(name):
    tx = TRANSFORMS[name]
    updates, _ = tx.update(gradients(0), tx.init(PARAMS), PARAMS)
    assert jax.tree.structure(updates) == jax.tree.structure(PARAMS)
    if name == "injected":
        pytest.skip("an injected float32 rate promotes the updates of any optax transform")
    for update, param in zip(jax.tree.leaves(updates), jax.tree.leaves(PARAMS), strict=True):
        assert (update.shape, update.dtype) == (param.shape, param.dtype)


@pytest.mark.exhaustive(after=8)
@pytest.mark.slow(after=2)
@table
def test_state_keeps_its_type_so_that_steps_can_be_scanned(name):
    tx = TRANSFORMS[name]
    state = tx.init(PARAMS)
    _, after = tx.update(gradients(0), state, PARAMS)
    assert avals(after) == avals(state)

    def body(carry, t):
        params, state = carry
        updates, state = tx.update(gradients(t), state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.jit(lambda c: jax.lax.scan(body, c, jnp.arange(5)))((PARAMS, state))
    looped, _ = run(tx, 5)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(looped), strict=True):
        assert np.allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive(after=8)
@pytest.mark.slow(after=2)
@table
def test_jit_gives_the_same_and_update_is_pure(name):
    tx = TRANSFORMS[name]
    plain, jitted = run(tx, 6), run(tx, 6, jax.jit(tx.update))
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(jitted), strict=True):
        assert np.allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=1e-5, atol=1e-6)
    state = tx.init(PARAMS)
    first, second = (tx.update(gradients(0), state, PARAMS) for _ in range(2))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), first, second))


@table
def test_init_works_on_shapes_alone(name):
    tx = TRANSFORMS[name]
    shapes = jax.eval_shape(tx.init, PARAMS)
    state = tx.init(PARAMS)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state
    )
    jitted = jax.jit(tx.init)(PARAMS)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), state, jitted))


@pytest.mark.exhaustive(after=8)
@pytest.mark.slow(after=2)
@table
def test_state_saves_and_restores(name, tmp_path):
    _, state = run(TRANSFORMS[name], 2)
    jrc.save(tmp_path, state)
    found = jrc.restore(tmp_path, TRANSFORMS[name].init(PARAMS))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), state, found))
    assert jax.tree.structure(found) == jax.tree.structure(state)


@pytest.mark.slow(after=3)
@table
def test_a_zero_gradient_gives_zero_updates_at_first(name):
    tx = TRANSFORMS[name]
    if name in ("clip and L2", "chained"):
        pytest.skip("weight decay moves the parameters")
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    updates, _ = tx.update(zeros, tx.init(PARAMS), PARAMS)
    assert all(bool((u == 0).all()) for u in jax.tree.leaves(updates))


# What follows mirrors optax's conformance tests for contributed optimizers
# (`optax/contrib/_common_test.py`), whose lists of optimizers are fixed.


@pytest.mark.slow(after=3)
@table
def test_update_ignores_extra_arguments(name):
    tx = TRANSFORMS[name]
    state = tx.init(PARAMS)
    assert name == "every second" or isinstance(tx, optax.GradientTransformationExtraArgs)
    plain = tx.update(gradients(0), state, PARAMS)
    extra = tx.update(gradients(0), state, PARAMS, value=jnp.float32(1.0), not_expected=1)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), plain, extra))


def test_update_compiles_once():
    tx = TRANSFORMS["dgc_momentum"]
    step = jax.jit(lambda g, s, p: tx.update(g, s, p, value=jnp.float32(1.0)))
    state = tx.init(PARAMS)
    for t in range(3):
        _, state = step(gradients(t), state, PARAMS)
    assert step._cache_size() == 1


@table
def test_tree_map_params(name):
    if name == "every second":
        pytest.skip("optax.MultiSteps is no transform")
    tx = TRANSFORMS[name]
    state = tx.init(PARAMS)
    mapped = optax.tree.map_params(tx, lambda v: v, state)
    assert jax.tree.structure(mapped) == jax.tree.structure(state)


@pytest.mark.slow(after=2)
@pytest.mark.parametrize(
    ("shape", "min_size"), [((3,), 0), ((2, 2), 10**9), ((3,), 10**9), ((2, 2), 0)]
)
def test_it_converges_on_a_parabola(shape, min_size):
    tx = jrc.dgc_momentum(1e-2, 0.9, 0, sparsity=0.5, min_size=min_size)
    final = jnp.linspace(1.0, -1.0, math.prod(shape)).reshape(shape)

    def body(carry, _):
        params, state = carry
        slope = jax.grad(lambda x: jnp.sum((x - final) ** 2))(params)
        updates, state = tx.update(slope, state, params)
        return (optax.apply_updates(params, updates), state), None

    start = jnp.full(shape, 10.0)
    (params, _), _ = jax.lax.scan(body, (start, tx.init(start)), length=3000)
    np.testing.assert_allclose(params, final, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes_are_stable_under_cond(dtype):
    with jax.enable_x64(dtype == "float64"):
        tx = jrc.dgc_momentum(1e-2, 0.9, 0, min_size=0)
        params = jnp.array([-1.0, 10.0, 1.0], dtype)

        @jax.jit
        def step(params, state, taken):
            updates, state = jax.lax.cond(
                taken, lambda: tx.update(params, state, params), lambda: (params, state)
            )
            return optax.apply_updates(params, updates), state

        state = tx.init(params)
        for taken in (True, False):
            params, state = step(params, state, taken)
        assert params.dtype == dtype


def test_a_schedule_in_the_place_of_a_number():
    found = []
    for rate in (1e-3, optax.constant_schedule(1e-3)):
        tx = jrc.dgc_momentum(rate, 0.9, 0, min_size=8)
        params, _ = run(tx, 5, jax.jit(tx.update))
        found.append(jax.tree.leaves(params))
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=1e-6)
