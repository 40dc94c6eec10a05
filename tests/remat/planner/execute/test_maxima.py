"""Derivatives of maxima, whose operands are computed again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrc
from jrc.remat._region.derivative_reads import derivative_reads
from tests.draws import normal


def maximum(place):
    """The maximum of each row, with a derivative at the entries that `place` says are largest."""
    fn = jax.custom_jvp(lambda x: jnp.max(x, axis=1))
    fn.defjvps(lambda d, y, x: jnp.sum(jnp.where(place(x - y[:, None], x, y[:, None]), d, 0), 1))
    return fn


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.max(x, axis=1),
        lambda x: jnp.min(x, axis=(0, 1)),
        lambda x: jax.ops.segment_max(x, np.array([0, 0, 1, 1]), num_segments=2),
        lambda x: jnp.zeros(4).at[np.array([0, 1])].max(x[0, :2]),
        maximum(lambda above, x, y: x >= y),
        maximum(lambda above, x, y: above >= 0),
        maximum(lambda above, x, y: jnp.sign(above) == 0),
        maximum(lambda above, x, y: jax.lax.map(lambda pair: pair[0] == pair[1], (x, y))),
    ],
    ids=["max", "min", "segment_max", "scatter", "rule", "difference", "sign", "loop"],
)
def test_a_maximum_is_compared_with_what_it_is_of(fn):
    # A result that was saved may differ in its last bit from operands that are computed again.
    operands, results = derivative_reads(lambda x: [fn(x)], [jnp.ones((4, 8))], [0])
    assert operands == {0} and not results


def test_a_result_that_is_compared_with_a_constant_is_read():
    @jax.custom_jvp
    def fn(x):
        return jnp.exp(x)

    fn.defjvps(lambda d, y, x: jnp.where(y > 1, d * y, d))
    operands, results = derivative_reads(lambda x: [fn(x)], [jnp.ones(8)], [0])
    assert results == {0} and not operands


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(
    "aggregate",
    [lambda h: jnp.max(h, axis=1), maximum(lambda above, x, y: above >= 0)],
    ids=["max", "rule"],
)
def test_saved_maxima_of_recomputed_values_have_their_derivative(aggregate):
    # XLA computes this tanh in two kernels, which differ in the last bit.
    index = jax.random.randint(jax.random.key(0), (1024, 16), 0, 1024)
    weights = [normal(seed, 64, 64, scale=0.1) for seed in (2, 3)]
    points = normal(1, 1024, 64)

    def loss(weights, points):
        for w in weights:
            between = points[index] - points[:, None]
            points = points + aggregate(jnp.tanh(between @ w))
        return jnp.mean(points**2)

    plan = jrc.plan(loss, weights, points, budget=0.1, minimize="flops", chunks=False)
    want = jax.jit(jax.grad(loss))(weights, points)
    found = jax.jit(jax.grad(plan.apply(loss)))(weights, points)
    for a, b in zip(want, found, strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-6 * float(jnp.abs(a).max()))
