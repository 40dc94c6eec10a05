"""Pads behind what is linear: equal results, and only where a product is made of fewer rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jrc._jaxpr import evaluate, flops, late_pads
from jrc._tree import is_floating
from tests.jaxpr.test_early_slices import W, X, equal, program_of, sliced_results
from tests.jaxpr.test_independent_axes import SAMPLES


def gradients_of_slices(function, axis, start, args):
    """The pullback of slices of a function's results, in each direction that has a derivative."""
    places = [i for i, x in enumerate(args) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]

    def run(*args):
        def of(*some):
            whole = list(args)
            for i, x in zip(places, some, strict=True):
                whole[i] = x
            results = sliced_results(function, axis, start, *whole)
            return [x for x in results if is_floating(x)]

        results, pullback = jax.vjp(of, *(args[i] for i in places))
        return pullback(
            [jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) for x in results]
        )

    return run


@pytest.mark.slow(after=20, every=True)
@pytest.mark.parametrize("name", SAMPLES)
def test_gradients_of_slices_of_every_operator(name):
    function, *args = SAMPLES[name]
    pairs = []
    for axis in range(3):
        for start in (0, 1):
            run = gradients_of_slices(function, axis, start, args)
            try:
                program = program_of(run, *args)
            except (NotImplementedError, ValueError, TypeError):
                continue  # it has no derivative
            pairs.append((program, late_pads(program)))
    equal(pairs, args)


def gradient(loss):
    return lambda x, w: jax.grad(loss, (0, 1))(x, w)


def padded(g, low=0, high=2, between=0):
    return lax.pad(g, 0.0, [(low, high, between), (0, 0, 0)])


MOVED = {
    "a loss without the last rows": gradient(
        lambda x, w: jnp.sum(jax.nn.logsumexp((x @ w)[:-2], axis=1))
    ),
    "rows of the middle": gradient(lambda x, w: jnp.sum(jnp.sin(x @ w)[1:-1])),
    "what is linear in front of the product": lambda x, w: (
        (-2 * padded(x[:5] @ w)).T @ x, jnp.sin(x @ w)
    ),
    "a sum of two that are padded alike": lambda x, w: (
        padded(x[2:] @ w) + padded(jnp.sin(x[2:] @ w))
    ) @ (w.T @ w),
    "a factor that is not padded": lambda x, w: (padded(x[:5] @ w) * jnp.cos(x @ w)) @ (w.T @ w),
}  # fmt: skip
STAYS = {
    "no product": lambda x, w: 2 * padded((x @ w)[:5]),
    "not linear": lambda x, w: jnp.cos(padded((x @ w)[:5])) @ (w.T @ w),
    "with steps": lambda x, w: lax.pad((x @ w)[:4], 0.0, [(0, 0, 1), (0, 0, 0)]) @ (w.T @ w),
    "with a row cut away": lambda x, w: padded(x @ w, high=-2) @ (w.T @ w),
    "with ones": lambda x, w: lax.pad((x @ w)[:5], 1.0, [(0, 2, 0), (0, 0, 0)]) @ (w.T @ w),
    "of two axes": lambda x, w: lax.pad((x @ w)[:5, 1:], 0.0, [(0, 2, 0), (1, 0, 0)]) @ (w.T @ w),
    "padded in different ways": lambda x, w: (
        padded((x @ w)[:5]) + padded((x @ w)[:5], low=2, high=0)
    ) @ (w.T @ w),
    "a product that is wider": lambda x, w: padded(x[:5]) @ jnp.concatenate([w, w], axis=1),
    "a quotient": lambda x, w: (
        padded((x @ w)[:5]) / jnp.sum(x, axis=1, keepdims=True)
    ) @ (w.T @ w),
    "entries by their place": lambda x, w: jnp.take(
        padded((x @ w)[:5]), jnp.array([3, 9]), axis=1
    ) @ w[:2],
    "alone": lambda x, w: padded(x[:5]),
    "what nothing reads": lambda x, w: (padded(x), x)[1],
    "along the axis of a sum": lambda x, w: lax.cumsum(padded((x @ w)[:5]), 0) @ (w.T @ w),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVED)
def test_a_product_is_made_of_what_is_padded(name):
    program = program_of(MOVED[name], X, W)
    new = late_pads(program)
    assert flops(new.jaxpr) < flops(program.jaxpr)
    equal([(program, new)], (X, W))
    tangent = lambda each: jax.jit(jax.grad(  # noqa: E731
        lambda w: sum(jnp.sum(jnp.sin(y)) for y in evaluate(each.jaxpr)(X, w))))(W)  # fmt: skip
    np.testing.assert_allclose(tangent(new), tangent(program), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", STAYS)
def test_it_stays_where_that_would_change_anything_else(name):
    program = program_of(STAYS[name], X, W)
    assert late_pads(program) is program


def test_rows_of_zeros_are_contracted_no_more():
    """The gradient of the weights is a product over the five rows that the loss has."""
    program = program_of(MOVED["a loss without the last rows"], X, W)
    contracted = [
        eqn.invars[0].aval.shape[eqn.params["dimension_numbers"][0][0][0]]
        for eqn in late_pads(program).eqns
        if eqn.primitive.name == "dot_general"
    ]
    assert sorted(contracted) == [4, 5, 5]  # the gradient of x, the loss, that of the weights
