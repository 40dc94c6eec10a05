"""The whole transform against plain NumPy and optax, and replicas against each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrc.dgc import dgc_momentum, dgc_stats, l1_penalty, scale_by_dgc
from tests.dgc.reference import Reference
from tests.dgc.replicas import (
    AXIS,
    VIAS,
    assert_bit_equal,
    assert_trees_close,
    descend,
    normal,
    some_params,
    trajectory,
)

RATE = 0.05

SETTINGS = {
    "plain": {},
    "nesterov": {"use_nesterov": True},
    "clip": {"local_grad_clip_norm": 2.0},
    "rsqrt clip": {"local_grad_clip_norm": 20.0, "clip_scaling": "rsqrt"},
    "early clip": {
        "local_grad_clip_norm": 2.0,
        "clip_before_rampup": True,
        "rampup_begin_step": 7,
    },
    "paddle's count": {"sparsity": (0.9,), "count_dtype": "float32"},
    "l2": {"regularization": 0.01},
    "l1": {"l1": 0.01},
    "unmasked": {"factor_masking": False},
    "ramp": {"sparsity": (0.75, 0.9375, 0.984375, 0.996, 0.999), "rampup_step": 15},
    "late": {"rampup_begin_step": 7},
    "all": {
        "use_nesterov": True,
        "local_grad_clip_norm": 2.0,
        "regularization": 0.01,
        "rampup_begin_step": 4,
        "rampup_step": 9,
        "sparsity": (0.5, 0.9, 0.999),
    },
}


def followed(params, gradients, **settings):
    """Return the parameters after each step of the reference, and the reference."""
    reference = Reference(replicas=4, min_size=1000, **settings)
    params = {name: np.asarray(leaf, np.float64) for name, leaf in params.items()}
    path = []
    for step in range(20):
        now = {name: np.asarray(leaf)[step] for name, leaf in gradients.items()}
        for name, direction in reference.update(now, params).items():
            params[name] = params[name] - RATE * direction
        path.append(dict(params))
    return {name: np.stack([each[name] for each in path]) for name in params}, reference


def descended(tx, params, gradients):
    return jax.jit(functools.partial(descend, tx))(params, gradients)


@pytest.mark.exhaustive(after=6)
@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("name", "exchange"),
    [*((name, "auto") for name in SETTINGS), ("plain", "dense"), ("all", "dense")],
)
def test_four_replicas_follow_the_published_formulas(name, exchange):
    params = some_params()
    gradients = normal(1, params, 20, 4)
    settings = {"rampup_begin_step": 0} | SETTINGS[name]
    expected, reference = followed(params, gradients, **settings)
    if (l1 := settings.pop("l1", None)) is not None:
        settings["regularization"] = l1_penalty(l1)
    tx = dgc_momentum(RATE, 0.9, min_size=1000, axis_name=AXIS, exchange=exchange, **settings)
    path, state = trajectory(tx, params, gradients)
    assert_trees_close({k: leaf[:, 0] for k, leaf in path.items()}, expected, 1e-5)
    for leaf in ("kernel", "scale"):
        for field, kept in (("u", reference.u), ("v", reference.v)):
            ranks = np.stack([kept[leaf, rank] for rank in range(4)])
            found = getattr(state[0], field)[leaf].reshape(ranks.shape)
            np.testing.assert_allclose(found, ranks, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_shard_map_and_pmap_give_the_same():
    params = some_params()
    gradients = normal(2, params, 20, 4)
    tx = dgc_momentum(
        RATE, 0.9, 3, 6, (0.75, 0.9375, 0.99), axis_name=AXIS, min_size=1000, num_trainers=4
    )
    first, state = trajectory(tx, params, gradients, VIAS[0])
    for via in VIAS[1:]:
        path, other = trajectory(tx, params, gradients, via)
        assert_trees_close(path, first, 1e-6)
        assert_trees_close(other, state, 1e-5)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("via", VIAS)
def test_replicas_stay_bit_equal_over_a_thousand_steps(via):
    params = {"w": jnp.linspace(-1.0, 1.0, 320), "b": jnp.ones(5)}
    gradients = normal(3, params, 1000, 4)
    tx = dgc_momentum(RATE, 0.9, 100, 300, (0.75, 0.9, 0.99), axis_name=AXIS, min_size=100)
    path, state = trajectory(tx, params, gradients, via)
    assert int(state[0].step) == 1000
    for leaf in jax.tree.leaves(path):
        assert np.isfinite(leaf).all()
        for rank in range(1, 4):
            np.testing.assert_array_equal(leaf[:, rank], leaf[:, 0])
    # The local state does differ between the replicas.
    ranks = state[0].v["w"]
    assert (ranks[0] != ranks[1]).any()


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("begin", "axis"), [(0, None), (0, AXIS), (1000, AXIS)])
def test_everything_sent_is_momentum_sgd(nesterov, begin, axis):
    params = some_params()
    gradients = normal(4, params, 50, 4)
    tx = dgc_momentum(
        RATE,
        0.9,
        begin,
        sparsity=0.0,
        use_nesterov=nesterov,
        factor_masking=False,
        axis_name=axis,
        min_size=1000,
    )
    mean = jax.tree.map(lambda g: g.mean(1), gradients)
    expected, _ = descended(optax.sgd(RATE, 0.9, nesterov), params, mean)
    if axis is None:
        path, _ = descended(tx, params, mean)
    else:
        path, _ = trajectory(tx, params, gradients)
        path = jax.tree.map(lambda x: x[:, 0], path)
    assert_trees_close(path, expected, 2e-6)


def test_everything_sent_and_masked_is_plain_sgd():
    params = {"w": some_params()["kernel"]}
    gradients = normal(5, params, 50, 4)
    tx = dgc_momentum(RATE, 0.9, 0, sparsity=0.0, axis_name=AXIS, min_size=1)
    path, _ = trajectory(tx, params, gradients)
    mean = jax.tree.map(lambda g: g.mean(1), gradients)
    expected, _ = descended(optax.sgd(RATE), params, mean)
    assert_trees_close(path["w"][:, 0], expected["w"], 2e-6)


def test_paddle_case_of_five_levels():
    tx = scale_by_dgc(
        0.9, sparsity=(0.75, 0.9375, 0.984375, 0.996, 0.999), rampup_step=10, min_size=0
    )
    params = jnp.zeros(102400)
    gradient = jax.random.normal(jax.random.key(0), params.shape)
    updates, state = jax.jit(tx.update)(gradient, tx.init(params), params)
    sent = np.flatnonzero(updates)
    assert sent.size == 25600
    assert not state.u[0, sent].any() and not state.v[0, sent].any()
    assert np.count_nonzero(state.u) == np.count_nonzero(state.v) == 102400 - 25600
    assert float(dgc_stats(state).density) == 0.25


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("exchange", ["allgather", "dense"])
@pytest.mark.parametrize("sparsity", [0.5, 0.99])
def test_all_sent_and_kept_is_the_sum_of_all_gradients(exchange, sparsity):
    # With momentum 0, sent so far + kept = the sum of all gradients.
    params = {"w": jnp.zeros((30, 20)), "x": jnp.zeros(150)}
    gradients = jax.tree.map(jnp.round, jax.tree.map(lambda g: 8 * g, normal(6, params, 12, 4)))
    tx = dgc_momentum(
        1.0, 0.0, 0, sparsity=sparsity, axis_name=AXIS, min_size=100, exchange=exchange
    )
    path, state = trajectory(tx, params, gradients)
    for name in params:
        kept = state[0].v[name].mean(0).reshape(-1)
        sent = -path[name][-1, 0].reshape(-1)
        everything = np.asarray(gradients[name]).sum(0).mean(0).reshape(-1)
        # Small integers: float32 adds them without rounding.
        np.testing.assert_array_equal(sent + kept, everything)


@pytest.mark.slow
def test_clipping_begins_with_the_rampup():
    params = jnp.zeros(200)
    gradient = jnp.full(200, 10.0)
    for begin, norm in ((0, 3.0), (1, float(jnp.linalg.norm(gradient)))):
        tx = scale_by_dgc(
            0.9, sparsity=0.0, rampup_begin_step=begin, local_grad_clip_norm=3.0, min_size=0
        )
        updates, _ = tx.update(gradient, tx.init(params), params)
        np.testing.assert_allclose(np.linalg.norm(updates), norm, rtol=1e-6)


def test_clip_before_the_rampup_if_asked():
    gradient = jnp.full(200, 10.0)
    tx = scale_by_dgc(
        0.9, rampup_begin_step=9, local_grad_clip_norm=3.0, clip_before_rampup=True, min_size=0
    )
    updates, _ = tx.update(gradient, tx.init(gradient), gradient)
    np.testing.assert_allclose(np.linalg.norm(updates), 3.0, rtol=1e-6)


@pytest.mark.slow
def test_rsqrt_on_divided_gradients_is_sqrt_on_mean_gradients():
    """`C / sqrt(N)` on gradients divided by N clips like `C sqrt(N)` on mean gradients."""
    params = {"w": jnp.zeros(200)}
    gradients = normal(7, params, 3, 4)
    args = {"sparsity": 0.9, "axis_name": AXIS, "min_size": 0, "local_grad_clip_norm": 4.0}
    _, mean = trajectory(scale_by_dgc(0.9, **args), params, gradients)
    divided = jax.tree.map(lambda g: g / 4, gradients)
    tx = scale_by_dgc(0.9, clip_scaling="rsqrt", **args)
    _, summed = trajectory(tx, params, divided)
    # A division by a power of two is exact.
    np.testing.assert_array_equal(4 * summed.u["w"], mean.u["w"])
    _, tight = trajectory(tx, params, gradients)
    assert np.abs(tight.u["w"]).max() < 0.3 * np.abs(mean.u["w"]).max()


@pytest.mark.slow
def test_zero_gradients_are_clipped_to_zero():
    tx = scale_by_dgc(0.9, local_grad_clip_norm=1.0, min_size=0)
    updates, state = tx.update(jnp.zeros(50), tx.init(jnp.zeros(50)))
    assert_bit_equal((updates, state.v), (jnp.zeros(50), jnp.zeros((1, 50))))
    assert int(state.skipped) == 0


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("turns", [1, 2, 10, 100])
def test_factor_masking_takes_a_known_share_of_momentum(turns):
    # Equal gradients: each entry is sent every `turns` steps.
    m, params, gradients = 0.9, {"w": jnp.zeros(turns)}, {"w": jnp.ones(turns)}
    moved = {}
    for masked in (True, False):
        tx = scale_by_dgc(m, sparsity=(1 - 1 / turns,), min_size=0, factor_masking=masked)

        def step(state, _, tx=tx):
            updates, state = tx.update(gradients, state, params)
            return state, updates["w"]

        _, path = jax.lax.scan(step, tx.init(params), None, length=40 * max(turns, 10))
        moved[masked] = path[-turns:].sum(0)
    assert jnp.allclose(moved[False], turns / (1 - m), rtol=1e-4)
    lost = m * (1 - m**turns) / (turns * (1 - m))
    assert jnp.allclose(moved[True] / moved[False], 1 - lost, rtol=1e-4)
