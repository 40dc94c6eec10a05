"""FLOPs and bytes against counts made by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from jrc._jaxpr import flops, nbytes

A, B = jnp.ones((8, 16)), jnp.ones((16, 32))
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
    "nobody reads it": (
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
}


@pytest.mark.parametrize("name", CASES)
def test_flops(name):
    counted, by_hand = CASES[name]
    assert counted() == by_hand


def test_gradient_of_a_dot_costs_two_dots():
    loss = lambda a, b: jnp.sum(a @ b)  # noqa: E731
    # The loss itself is not asked for, and a compiler does not run it.
    assert count(jax.grad(loss, argnums=(0, 1)), A, B) == 2 * DOT
    both = jax.value_and_grad(loss, argnums=(0, 1))
    assert count(both, A, B) == count(loss, A, B) + 2 * DOT


def test_bytes():
    assert nbytes(jax.typeof(A)) == 8 * 16 * 4
    assert nbytes(jax.typeof(A.astype(jnp.bfloat16))) == 8 * 16 * 2
    assert nbytes(jax.typeof(A > 0)) == 8 * 16
    assert nbytes(jax.typeof(jax.random.split(jax.random.key(0), 3))) == 3 * 8
