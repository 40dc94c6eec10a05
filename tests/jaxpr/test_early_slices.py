"""Slices in front of what they are taken of: equal results, and only where all want the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jrc._jaxpr import Program, early_slices, evaluate, inline_all
from tests.jaxpr.test_independent_axes import SAMPLES

X = np.sin(7 * np.arange(35, dtype=np.float32)).reshape(7, 5)
W = np.cos(3 * np.arange(20, dtype=np.float32)).reshape(5, 4)


def program_of(function, *args):
    return Program(inline_all(jax.make_jaxpr(function)(*args)))


def shapes(program):
    return [(eqn.primitive.name, v.aval.shape) for eqn in program.eqns for v in eqn.outvars]


def equal(pairs, args):
    """Programs give what others give; all are compiled as one, and not operator by operator."""
    run = jax.jit(lambda *args: [[evaluate(x.jaxpr)(*args) for x in pair] for pair in pairs])
    for wanted, found in run(*args):
        for a, b in zip(found, wanted, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


def sliced_results(function, axis, start, *args):
    """The function, of each result that has the axis a slice of it."""
    results = jax.tree.leaves(function(*args))
    return [
        lax.slice_in_dim(x, start, x.shape[axis], axis=axis)
        if x.ndim > axis and x.shape[axis] > start + 1
        else x
        for x in results
    ]


@pytest.mark.slow(after=20, every=True)
@pytest.mark.parametrize("name", SAMPLES)
def test_every_operator_computes_a_slice_of_what_it_computes(name):
    function, *args = SAMPLES[name]
    programs = [
        program_of(functools.partial(sliced_results, function, axis, start), *args)
        for axis in range(3)
        for start in (0, 1)
    ]
    equal([(program, early_slices(program)) for program in programs], args)


def log_probabilities(x, w):
    return jax.nn.log_softmax(x @ w)[:-1].sum(1)


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (3 * g,))

decayed = jax.custom_vjp(lambda x: x)
decayed.defvjp(lambda x: (x, x), lambda x, g: (g + x,))

MOVED = {
    "several readers that want the same": log_probabilities,
    "two slices alike": lambda x, w: jnp.tanh(x @ w)[1:] + jnp.sin(jnp.tanh(x @ w)[1:]),
    "a function with cotangents of its own": lambda x, w: doubled(x @ w)[2:],
    "another axis in front": lambda x, w: jnp.tanh(x @ w).T[:, 2:5],
    "a dead reader": lambda x, w: ((y := jnp.tanh(x @ w)).sum(), y[1:])[1],
}
STAYS = {
    "another reader wants all": lambda x, w: ((y := jnp.tanh(x @ w))[1:], y.sum()),
    "two slices that differ": lambda x, w: (y := jnp.tanh(x @ w))[1:] * y[:-1],
    "with a step": lambda x, w: jnp.tanh(x @ w)[::2],
    "of two axes": lambda x, w: jnp.tanh(x @ w)[1:, 1:],
    "along the axis of a sum": lambda x, w: lax.cumsum(jnp.tanh(x @ w), 0)[1:],
    "an effect": lambda x, w: (y := jnp.tanh(x @ w), jax.debug.print("{}", y), y[1:])[2],
    "a rule that adds to a gradient of zero": lambda x, w: decayed(x @ w)[2:],
    "such a rule in a loop": lambda x, w: lax.fori_loop(0, 2, lambda _, y: decayed(y), x @ w)[2:],
    "a result": lambda x, w: ((y := jnp.tanh(x @ w)), y[1:]),
    "an argument": lambda x, w: x[1:] @ w,
}


@pytest.mark.parametrize("name", MOVED)
def test_a_slice_moves_in_front_of_a_product(name):
    program = program_of(MOVED[name], X, W)
    new = early_slices(program)
    before, after = shapes(program), shapes(new)
    assert ("dot_general", (7, 4)) in before
    assert not any(name == "dot_general" and 7 in shape for name, shape in after)
    first = [name for name, _ in after].index("dot_general")
    assert not any(7 in shape for _, shape in after[first:])
    equal([(program, new)], (X, W))
    gradient = lambda each: jax.jit(jax.grad(  # noqa: E731
        lambda w: sum(map(jnp.sum, evaluate(each.jaxpr)(X, w)))))(W)  # fmt: skip
    np.testing.assert_allclose(gradient(new), gradient(program), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", STAYS)
def test_it_stays_where_that_would_change_anything_else(name):
    program = program_of(STAYS[name], X, W)
    assert early_slices(program) is program


def test_it_ends_at_a_product():
    """A layer in front of it runs on all rows: of 8,192 rows 8,191 would be slower."""
    program = program_of(lambda x, w: (jnp.tanh(x @ w @ w.T) @ w)[1:], X, W)
    rows = [shape[0] for name, shape in shapes(early_slices(program)) if name == "dot_general"]
    assert rows == [7, 7, 6]


def test_a_slice_of_a_split_axis_stays_behind_the_reshape():
    """Two of four heads are not the first two columns."""

    def heads(x, w):
        return jnp.sum(jnp.tanh((x @ w).reshape(6, 4, 3)[:, :2]))

    args = jnp.ones((6, 5)), jnp.arange(60.0).reshape(5, 12)
    program = Program(inline_all(jax.make_jaxpr(heads)(*args).jaxpr))
    new = early_slices(program)
    np.testing.assert_allclose(evaluate(new.jaxpr)(*args)[0], heads(*args), rtol=1e-6)
