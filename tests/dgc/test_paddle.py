"""Unit cases of Paddle's momentum operator, against its formulas in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrc.dgc import dgc_momentum, l1_penalty
from tests.dgc.replicas import AXIS, stepper

SHAPE, RATE, MOMENTUM, BEGIN, TRAINERS = (123, 321), 1e-3, 1e-4, 10, 2


def case(**options):
    """A transform, parameters, and gradients of two trainers, all in [0, 1)."""
    rng = np.random.default_rng(0)
    param = rng.random(SHAPE, np.float32)
    grads = rng.random((TRAINERS, *SHAPE), np.float32)
    tx = dgc_momentum(
        RATE,
        MOMENTUM,
        BEGIN,
        num_trainers=TRAINERS,
        axis_name=AXIS,
        **{"sparsity": 0.999, **options},
    )
    return tx, param, grads


def step_from(tx, param, grads, step, velocity):
    """Parameters and state after the step with this number."""
    state, update = stepper(tx, jnp.asarray(param), TRAINERS)
    rows = jnp.tile(velocity, (TRAINERS, 1, 1))
    dgc = state[0]._replace(step=jnp.full_like(state[0].step, step), u=rows)
    updates, after = jax.block_until_ready(update(grads, (dgc, *state[1:]), jnp.asarray(param)))
    return param + np.asarray(updates), after[0]


@pytest.mark.parametrize("start", ["zero", "random"])
def test_step_0_is_momentum(start):
    tx, param, grads = case()
    velocity = np.random.default_rng(1).random(SHAPE, np.float32) * (start == "random")
    got, state = step_from(tx, param, grads, 0, velocity)
    velocity_out = MOMENTUM * velocity + grads.sum(0) / TRAINERS
    np.testing.assert_allclose(got, param - RATE * velocity_out, rtol=0, atol=1e-5)
    for row in np.asarray(state.u):
        np.testing.assert_allclose(row, velocity_out, rtol=0, atol=1e-5)
    assert not np.any(state.v)


@pytest.mark.parametrize(
    ("options", "count"), [({}, 39), ({"sparsity": 0.9}, 3948), ({"sparsity": 0.0}, 39483)]
)
def test_step_15_is_sgd_on_what_was_sent(options, count):
    tx, param, grads = case(**options)
    velocity = np.zeros(SHAPE, np.float32)
    got, state = step_from(tx, param, grads, 15, velocity)
    total = np.zeros(param.size, np.float32)
    for rank in range(TRAINERS):
        u = MOMENTUM * velocity.ravel() + grads[rank].ravel()
        sent = np.argsort(-np.abs(u), kind="stable")[:count]
        total[sent] += u[sent]
        u[sent] = 0
        np.testing.assert_allclose(state.u[rank].ravel(), u, rtol=0, atol=1e-5)
        np.testing.assert_allclose(state.v[rank].ravel(), u, rtol=0, atol=1e-5)
    want = param - RATE * total.reshape(SHAPE) / TRAINERS
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    # Larger than the tolerance, so the test depends on which entries were sent.
    assert np.abs(want - param).max() > 4e-4


def test_l1_decay_adds_the_sign():
    tx, param, grads = case(regularization=l1_penalty(0.25))
    got, _ = step_from(tx, param - 0.5, grads, 0, np.zeros(SHAPE, np.float32))
    want = param - 0.5 - RATE * (grads.mean(0) + 0.25 * np.sign(param - 0.5))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
