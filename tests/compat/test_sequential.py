"""Paddle's `recompute_sequential(ctx, functions, *args)`."""

import jax
import jax.numpy as jnp
import pytest

import jrc
from jrc import compat
from tests.remat.measure import bit_equal, operators

W, X = jnp.ones((3, 3)) / 3, jnp.ones((2, 3))


def loss(call):
    return lambda w, x: jnp.sum(call([lambda x: jnp.sin(x @ w)] * 4, x))


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("segments", [1, 2, 4])
def test_it_is_ours_with_paddle_s_arguments(segments):
    ctx = {"segments": segments, "preserve_rng_state": True}
    theirs = loss(lambda layers, x: compat.recompute_sequential(ctx, layers, x))
    ours = loss(lambda layers, x: jrc.recompute_sequential(layers, x, segments=segments))
    assert operators(jax.grad(theirs), W, X) == operators(jax.grad(ours), W, X)
    assert bit_equal(jax.grad(theirs)(W, X), jax.grad(ours)(W, X))


def test_one_segment_is_the_default():
    plain = loss(lambda layers, x: compat.recompute_sequential({}, layers, x))
    assert operators(jax.grad(plain), W, X)["sin"] == 4


def test_errors_name_the_function_that_was_called():
    with pytest.raises(TypeError, match="jrc.compat.recompute_sequential: functions"):
        compat.recompute_sequential({"segments": 1}, [3], X)
