"""Regions inside regions: nothing is recomputed twice, and the innermost rule wins."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import jrc
from tests.remat.measure import largest_error, operators

W = jnp.linspace(-0.5, 0.5, 16).reshape(4, 4)
X = jnp.linspace(-0.4, 0.6, 16).reshape(4, 4)


def plainly(fn):
    return fn


def reentrant(fn):
    return functools.partial(jrc.recompute, fn)


def checkpointed(fn):
    return functools.partial(jrc.recompute, fn, use_reentrant=False)


def segment(fn):
    return jrc.recompute_segments(lambda w, x: jrc.mark(fn(w, x), "out"), ["out"])


def jitted(fn):
    return jax.jit(reentrant(fn))


def two_products(w, x):
    return jnp.sin(jnp.sin(x @ w) @ w)


def loss(w, x, inner, outer):
    """Three products in the outer region, two of them in the inner one; and one behind."""
    return jnp.sum(outer(lambda w, x: jnp.cos(inner(two_products)(w, x) @ w))(w, x) @ w)


def recomputed(inner, outer, name="dot_general"):
    counts = [
        operators(jax.grad(functools.partial(loss, inner=i, outer=o), (0, 1)), W, X)[name]
        for i, o in ((inner, outer), (plainly, plainly))
    ]
    return counts[0] - counts[1]


TRANSFORMS = [reentrant, checkpointed, segment, jitted]


@pytest.mark.slow(after=4, every=True)
@pytest.mark.parametrize("outer", TRANSFORMS)
@pytest.mark.parametrize("inner", TRANSFORMS)
def test_nothing_is_recomputed_twice(inner, outer):
    assert recomputed(inner, plainly) == 2
    assert recomputed(plainly, outer) == 3 == recomputed(inner, outer)
    grads = [
        jax.grad(functools.partial(loss, inner=i, outer=o), (0, 1))(W, X)
        for i, o in ((inner, outer), (plainly, plainly))
    ]
    assert largest_error(*grads) < 1e-6


def test_segments_that_are_not_recomputed_keep_their_inner_regions():
    keep = lambda fn: jrc.recompute_segments(  # noqa: E731
        lambda w, x: jrc.mark(fn(w, x), "out"), ["out"], no_recompute_segments=[0]
    )
    assert recomputed(reentrant, keep) == 2


def test_a_region_in_a_loop_is_recomputed_in_its_step():
    """Otherwise the recomputed loop would save the inner values of all steps."""

    def scanned(call):
        step = lambda c, _: (call(two_products)(W, c), None)  # noqa: E731
        return lambda w, x: jnp.sum(jax.lax.scan(step, x @ w, None, length=3)[0])

    lean = functools.partial(jrc.recompute, scanned(checkpointed))
    assert largest_error(jax.grad(lean)(W, X), jax.grad(scanned(plainly))(W, X)) < 1e-6
    text = str(jax.make_jaxpr(jax.grad(lean))(W, X))
    assert "f32[3,4,4]" in text


def test_a_rule_inside_saves_the_result_of_its_region_too():
    """The inner rule names tanh, which is the result of the inner region."""

    def inner(fn):
        return jrc.apply_rules(lambda w, x: jnp.tanh(fn(w, x) @ w), jrc.SavePrimitives("tanh"))

    def without(fn):
        return lambda w, x: jnp.tanh(fn(w, x) @ w)

    names = ("dot_general", "sin", "tanh")
    alone = [recomputed(inner, plainly, name) for name in names]
    within = [recomputed(inner, checkpointed, name) for name in names]
    base = [recomputed(without, plainly, name) for name in names]
    # The product behind `fn` gives tanh and is not recomputed; the outer region adds its own one.
    assert [a - b for a, b in zip(alone, base, strict=True)] == [2, 2, 0]
    assert [a - b for a, b in zip(within, base, strict=True)] == [3, 2, 0]


class Inner(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = jnp.sin(nn.Dense(4, use_bias=False)(x))
        return jnp.sin(nn.Dense(4, use_bias=False)(x))


class Outer(nn.Module):
    inner: type = Inner

    @nn.compact
    def __call__(self, x):
        return jnp.cos(nn.Dense(4, use_bias=False)(self.inner()(x)))


def linen_products(inner, outer):
    cls = jrc.recompute_module(Inner) if inner else Inner
    module = jrc.recompute_module(Outer(cls)) if outer else Outer(cls)
    params = module.init(jax.random.key(0), X)
    run = lambda params: jnp.sum(module.apply(params, X) @ W)  # noqa: E731
    return operators(jax.grad(run), params)["dot_general"]


def nnx_products(inner, outer):
    class Within(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(4, 4, use_bias=False, rngs=rngs) for _ in range(2)])

        def __call__(self, x):
            for layer in self.layers:
                x = jnp.sin(layer(x))
            return x

    class Around(nnx.Module):
        def __init__(self, rngs):
            self.inner = (jrc.recompute_module(Within) if inner else Within)(rngs)
            self.last = nnx.Linear(4, 4, use_bias=False, rngs=rngs)

        def __call__(self, x):
            return jnp.cos(self.last(self.inner(x)))

    module = (jrc.recompute_module(Around) if outer else Around)(nnx.Rngs(0))
    graph, params = nnx.split(module)
    run = lambda params: jnp.sum(nnx.merge(graph, params)(X) @ W)  # noqa: E731
    return operators(jax.grad(run), params)["dot_general"]


@pytest.mark.parametrize("products", [linen_products, nnx_products])
def test_modules_inside_modules(products):
    plain = products(False, False)
    counts = [products(*marked) - plain for marked in ((True, False), (False, True), (True, True))]
    assert counts == [2, 3, 3]
