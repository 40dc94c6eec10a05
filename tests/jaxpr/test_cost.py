"""FLOPs and bytes against counts made by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from jrc._jaxpr import (
    equation_flops,
    flops,
    inner_programs,
    live_equations,
    nbytes,
    sums_in_carries,
    walk,
)

A, B = jnp.ones((8, 16)), jnp.ones((16, 32))
KEY = jax.random.key(0)
DOT = 2 * 8 * 16 * 32


def count(fn, *args):
    return flops(jax.make_jaxpr(fn)(*args))


def doubled(a, cost=None):
    def kernel(given, result):
        result[...] = 2 * given[...]

    rows = pl.BlockSpec((2, a.shape[1]), lambda i: (i, 0))
    grid = {"grid": (a.shape[0] // 2,), "in_specs": [rows], "out_specs": rows}
    return pl.pallas_call(kernel, out_shape=a, interpret=True, cost_estimate=cost, **grid)(a)


CASES = {
    "dot": (lambda: count(jnp.dot, A, B), DOT),
    "batched": (
        lambda: count(jax.vmap(jnp.dot), A[None].repeat(3, 0), B[None].repeat(3, 0)),
        3 * DOT,
    ),
    "scan": (
        lambda: count(
            lambda a: jax.lax.scan(lambda c, _: (c @ c, None), a, None, length=5), B[:, :16]
        ),
        5 * 2 * 16**3,
    ),
    "nested scan": (
        lambda: count(
            lambda a: jax.lax.scan(
                lambda c, _: jax.lax.scan(lambda c, _: (jnp.sin(c), None), c, None, length=3),
                a,
                None,
                length=5,
            ),
            A,
        ),
        15 * A.size,
    ),
    "cond": (
        lambda: count(
            lambda a: jax.lax.cond(True, lambda a: jnp.sin(a), lambda a: jnp.sin(jnp.sin(a)), a), A
        ),
        2 * A.size,
    ),
    "jit": (lambda: count(jax.jit(jnp.dot), A, B), DOT),
    "checkpoint": (lambda: count(jax.checkpoint(jnp.dot), A, B), DOT),
    "convolution": (
        lambda: count(
            lambda x, k: jax.lax.conv(x, k, (1, 1), "SAME"),
            jnp.ones((2, 3, 8, 8)),
            jnp.ones((5, 3, 3, 3)),
        ),
        2 * (2 * 5 * 8 * 8) * (3 * 3 * 3),
    ),
    "moving data": (lambda: count(lambda a: a.T.reshape(-1)[None], A), 0),
    "not read": (
        lambda: count(
            lambda a: jax.lax.scan(lambda c, _: (jnp.sin(c), c @ B), a, None, length=5)[0], A
        ),
        5 * A.size,
    ),
    "kernel": (lambda: count(doubled, A), A.size),
    "kernel with its cost": (
        lambda: count(lambda a: doubled(a, pl.CostEstimate(70, 7, bytes_accessed=0)), A),
        77,
    ),
    "sum": (lambda: count(jnp.sum, A), A.size),
    "random bits": (lambda: count(lambda key: jax.random.bits(key, (7, 3)), KEY), 112 * 21),
    "random bits of rbg": (
        lambda: count(lambda key: jax.random.bits(key, (7, 3)), jax.random.key(0, impl="rbg")),
        21,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_flops(name):
    counted, by_hand = CASES[name]
    assert counted() == by_hand


def test_gradient_of_a_dot_costs_two_dots():
    loss = lambda a, b: jnp.sum(a @ b)  # noqa: E731
    # The loss itself is no result, so a compiler does not compute it.
    assert count(jax.grad(loss, argnums=(0, 1)), A, B) == 2 * DOT
    both = jax.value_and_grad(loss, argnums=(0, 1))
    assert count(both, A, B) == count(loss, A, B) + 2 * DOT


def test_bytes():
    assert nbytes(jax.typeof(A)) == 8 * 16 * 4
    assert nbytes(jax.typeof(A.astype(jnp.bfloat16))) == 8 * 16 * 2
    assert nbytes(jax.typeof(A > 0)) == 8 * 16
    assert nbytes(jax.typeof(jax.random.split(jax.random.key(0), 3))) == 3 * 8


def ragged_dot(x, w):
    return jax.lax.ragged_dot(x, w, jnp.array([16, 16, 16, 16]))


def test_a_ragged_product_costs_one_matrix_a_row():
    x, w = jnp.ones((64, 128)), jnp.ones((4, 128, 256))
    once = 2 * 64 * 128 * 256
    assert flops(jax.make_jaxpr(ragged_dot)(x, w)) == once == 4_194_304
    gradient = jax.grad(lambda x, w: jnp.sum(ragged_dot(x, w)), argnums=(0, 1))
    products = flops(jax.make_jaxpr(gradient)(x, w))
    assert 2 * once <= products <= 2.02 * once


def largest_flops(function, *shapes):
    """Return the FLOPs of the most expensive equation; JAX adds masks and the like around it."""
    jaxpr = jax.make_jaxpr(function)(*(jnp.ones(shape) for shape in shapes))
    return max(equation_flops(eqn) for eqn, _ in walk(jaxpr) if not inner_programs(eqn))


@pytest.mark.parametrize(
    ("function", "shapes", "count"),
    [
        (lambda a: jax.lax.linalg.cholesky(a, symmetrize_input=False), [(5, 12, 12)],
         5 * 12**3 // 3),
        (lambda a: jax.lax.linalg.lu(a)[0], [(12, 12)], 2 * 12**3 // 3),
        (jax.lax.linalg.lu, [(24, 12)], 24 * 12**2 - 12**3 // 3),
        (lambda a: jax.lax.linalg.qr(a, full_matrices=False), [(24, 12)],
         2 * (2 * 24 * 12**2 - 2 * 12**3 // 3)),
        (lambda a, b: jax.lax.linalg.triangular_solve(a, b, left_side=True), [(12, 12), (12, 7)],
         12 * 12 * 7),
        (lambda a: jax.lax.linalg.eigh(a, symmetrize_input=False), [(2, 12, 12)], 2 * 9 * 12**3),
        (lambda a: jax.lax.linalg.svd(a, compute_uv=False), [(24, 12)],
         4 * 24 * 12**2 - 4 * 12**3 // 3),
        (lambda a: jax.lax.fft(a.astype(complex), "fft", (16,)), [(3, 16)], 3 * 5 * 16 * 4),
        (lambda a: jax.lax.fft(a, "rfft", (16,)), [(3, 16)], 3 * 5 * 16 * 4 // 2),
        (lambda a: jax.lax.top_k(a, 7), [(3, 16)], 3 * 16 * 3),
    ],
)  # fmt: skip
def test_linear_algebra_has_the_textbook_counts(function, shapes, count):
    assert largest_flops(function, *shapes) == count


def test_the_zeros_of_a_dilated_input_are_not_counted():
    x, w = jnp.ones((1, 3, 16, 16)), jnp.ones((8, 3, 2, 2))

    def strided(x):
        return jnp.sum(jax.lax.conv(x, w, (2, 2), "VALID"))

    forward = flops(jax.make_jaxpr(lambda x: jax.lax.conv(x, w, (2, 2), "VALID"))(x))
    backward = flops(jax.make_jaxpr(jax.grad(strided))(x))
    # The input's gradient is a convolution over a dilated cotangent; the products are the same.
    assert forward == 2 * 8 * 8 * 8 * 3 * 4
    assert forward <= backward <= 1.2 * forward


def test_sums_in_carries_are_counted_with_their_steps():
    """Gradients of what all steps read are summed in carries; a state that changes is no sum."""

    def step(w, state, x):
        return jnp.tanh(state @ w) + x, jnp.sum(state)

    def loss(w, xs):
        state, sums = jax.lax.scan(lambda state, x: step(w, state, x), xs[0], xs)
        return jnp.sum(state) + jnp.sum(sums)

    args = jax.ShapeDtypeStruct((4, 4), "float32"), jax.ShapeDtypeStruct((3, 2, 4), "float32")
    gradient = jax.make_jaxpr(jax.grad(loss))(*args).jaxpr
    found = [(eqn.outvars[0].aval.shape, n) for eqn, n in sums_in_carries(live_equations(gradient))]
    assert found == [((4, 4), 3)]
    twice = jax.make_jaxpr(lambda ws, xs: jax.lax.map(lambda w: jax.grad(loss)(w, xs), ws))
    ws = jax.ShapeDtypeStruct((5, 4, 4), "float32")
    found = [n for _, n in sums_in_carries(live_equations(twice(ws, args[1]).jaxpr))]
    assert found == [15]
