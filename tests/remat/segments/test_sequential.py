"""A chain of functions, cut into segments, of which all but the last are recomputed."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jrc
from tests.remat.measure import bit_equal, largest_error, operators, saved_bytes

W = jnp.linspace(-0.5, 0.5, 80).reshape(5, 4, 4)
X = jnp.linspace(-0.4, 0.6, 16).reshape(4, 4)


def layers(w):
    return [functools.partial(lambda w, x: jnp.sin(jnp.sin(x @ w)), w[i]) for i in range(len(w))]


def plain(w, x):
    for layer in layers(w):
        x = layer(x)
    return jnp.sum(x**2)


def lean(w, x, segments):
    return jnp.sum(jrc.recompute_sequential(layers(w), x, segments=segments) ** 2)


# Five functions: the segments' sizes and how many of them are re-run.
@pytest.mark.slow(after=2)
@pytest.mark.parametrize(
    ("segments", "rerun"), [(1, 0), (2, 2), (3, 2), (4, 3), (5, 4)]
)  # 5 | 2 3 | 1 1 3 | 1 1 1 2 | 1 1 1 1 1
def test_gradients_equal_and_products_recomputed_in_all_segments_but_the_last(segments, rerun):
    cut = functools.partial(lean, segments=segments)
    grads = [jax.value_and_grad(f, argnums=(0, 1)) for f in (cut, plain)]
    with jax.disable_jit():
        assert bit_equal(grads[0](W, X), grads[1](W, X))
    assert largest_error(*(jax.jit(g)(W, X) for g in grads)) < 1e-6
    more = operators(grads[0], W, X)["dot_general"] - operators(grads[1], W, X)["dot_general"]
    assert more == rerun


def test_saved_bytes_fall_by_the_inner_values_of_the_segments():
    saved = [saved_bytes(functools.partial(lean, segments=k), W, X) for k in (1, 2, 5)]
    assert saved[0] == saved_bytes(plain, W, X)
    # A function saves two cosines, and the sine that is the next one's input. Recomputed, the last
    # of a segment still leaves that sine: it is the input of the next segment, which is saved.
    assert saved[0] - saved[1] == (2 * 2 + 1) * X.nbytes
    assert saved[0] - saved[2] == (4 * 2) * X.nbytes


@pytest.mark.parametrize("batch", [1, 3, 4])
def test_any_batch_size_and_any_sequence_of_functions(batch):
    x = X[:1].repeat(batch, 0)
    got = [jrc.recompute_sequential(f(layers(W)), x, segments=3) for f in (list, tuple, iter)]
    want = functools.reduce(lambda x, layer: layer(x), layers(W), x)
    assert all(largest_error(y, want) < 1e-6 for y in got)


def test_the_first_takes_many_arguments_and_a_tuple_is_one():
    seen = []

    def first(w, x):
        return x @ w, x

    def second(pair):
        seen.append(type(pair))
        return pair[0] * pair[1], {"x": pair[1]}

    def third(pair):
        seen.append(type(pair))
        return pair[0] + pair[1]["x"]

    for segments in (1, 2, 3):
        got = jrc.recompute_sequential([first, second, third], W[0], X, segments=segments)
        assert largest_error(got, (X @ W[0]) * X + X) < 1e-6
    assert set(seen) == {tuple}
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        jrc.recompute_sequential([first, lambda y, x: y], W[0], X, segments=2)


def test_random_state_is_passed_on():
    def dropped(pair):
        x, key = pair
        key, own = jax.random.split(key)
        return x * jax.random.bernoulli(own, 0.5, x.shape), key

    ones = jnp.ones(1000)

    def loss(x, preserve):
        chain, key = [dropped, lambda pair: pair[0]], jax.random.key(3)
        out = jrc.recompute_sequential(chain, (x, key), segments=2, preserve_rng_state=preserve)
        return jnp.sum(out)

    mask = dropped((ones, jax.random.key(3)))[0]
    assert bit_equal(jax.grad(loss)(ones, True), mask)
    assert 300 < int(jnp.sum(jax.grad(loss)(ones, False) != mask)) < 700
    with pytest.raises(ValueError, match="must contain a typed key.*got none"):
        jrc.recompute_sequential(layers(W), X, segments=2, preserve_rng_state=False)


@pytest.mark.parametrize(
    ("functions", "segments", "error", "match"),
    [
        ([], 1, ValueError, "at least one, got none. Return the arguments"),
        (jnp.sin, 1, TypeError, r"list of functions, got .*\. Write \[first, second\]"),
        ([jnp.sin, 3], 1, TypeError, "got int at place 1. Wrap it in a function"),
        ([jnp.sin] * 3, 0, ValueError, "whole number from 1 to 3, got 0. segments=3"),
        ([jnp.sin] * 3, 4, ValueError, "whole number from 1 to 3, got 4"),
        ([jnp.sin] * 3, True, TypeError, "whole number from 1 to 3, got True. segments=3"),
        ([jnp.sin] * 3, 2.0, TypeError, "whole number from 1 to 3, got 2.0"),
    ],
)
def test_errors(functions, segments, error, match):
    with pytest.raises(error, match=match):
        jrc.recompute_sequential(functions, X, segments=segments)
