"""Recomputation on several devices: shardings are kept, collectives are not recomputed."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jrc
from tests.remat.measure import largest_error

X = jnp.linspace(-0.4, 0.6, 64).reshape(8, 8)
W = jnp.linspace(-0.5, 0.5, 64).reshape(8, 8)
NAMES = ["h0", "h1"]


def mesh_2x2():
    return Mesh(
        [[jax.devices()[0], jax.devices()[1]], [jax.devices()[2], jax.devices()[3]]], ("a", "b")
    )


def layers(w, x):
    for name in NAMES:
        x = jrc.mark(jnp.sin(jnp.sin(x @ w) @ w), name)
    return jnp.sum(x**2)


def compiled(fn, *args):
    return jax.jit(jax.value_and_grad(fn)).lower(*args).compile().as_text()


def shapes(text, operator):
    """Per-device shapes of an operator's results, fused ones included."""
    return re.findall(rf"= (\S+?)\{{\S* {operator}\(", text)


@pytest.mark.parametrize("constrained", [False, True])
def test_rerun_values_keep_the_sharding_of_the_originals(constrained):
    mesh = mesh_2x2()
    rows = NamedSharding(mesh, P("a", "b"))

    def loss(w, x):
        for name in NAMES:
            x = jnp.sin(x @ w)
            x = lax.with_sharding_constraint(x, rows) if constrained else x
            x = jrc.mark(jnp.sin(x @ w), name)
        return jnp.sum(x**2)

    args = jax.device_put(W, NamedSharding(mesh, P(None, "b"))), jax.device_put(X, rows)
    lean = jrc.recompute_segments(loss, NAMES)
    texts = [compiled(f, *args) for f in (lean, loss)]
    lean_sines, plain_sines = (shapes(text, "sine") for text in texts)
    assert len(lean_sines) > len(plain_sines)
    # 8 x 8 on 2 x 2 devices, in the recomputation as in the forward pass.
    assert set(lean_sines) == set(plain_sines) == {"f32[4,4]"}
    assert len(shapes(texts[0], "cosine")) > 0 and set(shapes(texts[0], "cosine")) == {"f32[4,4]"}
    got = jax.jit(jax.value_and_grad(lean))(*args)
    assert largest_error(got, jax.value_and_grad(layers)(W, X)) < 1e-6


COLLECTIVES = {
    "psum": (lambda x: lax.psum(x, "a"), "all-reduce"),
    "pmean": (lambda x: lax.pmean(x, "a"), "all-reduce"),
    "all_gather": (lambda x: lax.all_gather(x, "a", tiled=True)[: x.shape[0]], "all-gather"),
    "all_to_all": (lambda x: lax.all_to_all(x, "a", 0, 0, tiled=True), "all-to-all"),
    "ppermute": (lambda x: lax.ppermute(x, "a", [(0, 1), (1, 0)]), "collective-permute"),
    "psum_scatter": (
        lambda x: jnp.tile(lax.psum_scatter(x, "a", tiled=True), (2, 1)),
        "reduce-scatter",
    ),
}


def gathering(collective, w, x):
    """Two layers whose middle crosses devices, and is needed for the derivative of what follows."""
    for name in NAMES:
        x = jnp.sin(collective(jnp.sin(x @ w)) * x)
        x = jrc.mark(x, name)
    return jnp.sum(x**2)


def on_mesh(fn, check_vma):
    mesh = mesh_2x2()

    def local(w, x):
        if check_vma:
            w = lax.pcast(w, ("a", "b"), to="varying")
        return lax.psum(fn(w, x), ("a", "b"))

    return jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P("a", "b")), out_specs=P(), check_vma=check_vma
    )


def count(fn, operator, *args):
    text = compiled(fn, *args)
    return len(re.findall(rf" {operator}(?:-start)?\(", text))


# The others take half a minute together.
QUICK = ("psum", "all_gather")
EACH = [n if n in QUICK else pytest.param(n, marks=pytest.mark.exhaustive) for n in COLLECTIVES]


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", EACH)
def test_collectives_are_recomputed_only_on_request(name, check_vma):
    collective, operator = COLLECTIVES[name]
    plain = functools.partial(gathering, collective)
    args = W[:4, :4], X

    def both(around):
        """The transform inside of `shard_map`, and around it."""
        return on_mesh(around(plain), check_vma), around(on_mesh(plain, check_vma))

    def segments(**options):
        return lambda f: jrc.recompute_segments(f, NAMES, **options)

    want = jax.value_and_grad(on_mesh(plain, check_vma))(*args)
    base = count(on_mesh(plain, check_vma), operator, *args)
    inside = on_mesh(segments()(plain), check_vma)
    assert count(inside, operator, *args) == base
    again = on_mesh(segments(recompute_collectives=True)(plain), check_vma)
    assert count(again, operator, *args) > base
    for lean in (inside, again):
        assert largest_error(jax.jit(jax.value_and_grad(lean))(*args), want) < 1e-6
    for around in (
        lambda f: functools.partial(jrc.recompute, f),
        lambda f: jrc.apply_rules(f, jrc.SavePrimitives("sin")),
    ):
        for lean in both(around):
            assert count(lean, operator, *args) == base
            assert largest_error(jax.jit(jax.value_and_grad(lean))(*args), want) < 1e-6


@pytest.mark.slow
def test_collectives_in_a_segment_around_shard_map_and_in_pmap():
    def inner(w, x):
        return jnp.sin(lax.psum(jnp.sin(x @ w), "a") * x)

    block = jax.shard_map(
        inner, mesh=Mesh(jax.devices()[:4], ("a",)), in_specs=(P(), P("a")), out_specs=P("a")
    )

    def loss(call, w, x):
        for name in NAMES:
            x = jrc.mark(call(w, x), name)
        return jnp.sum(x**2)

    plain = functools.partial(loss, block)
    lean = jrc.recompute_segments(plain, NAMES)
    again = jrc.recompute_segments(plain, NAMES, recompute_collectives=True)
    counts = [count(f, "all-reduce", W, X) for f in (plain, lean, again)]
    assert counts[0] == counts[1] < counts[2]
    want = jax.value_and_grad(plain)(W, X)
    assert largest_error(jax.jit(jax.value_and_grad(lean))(W, X), want) < 1e-6

    mapped = jax.pmap(inner, axis_name="a", in_axes=(None, 0), devices=jax.devices()[:4])
    plain, parts = functools.partial(loss, mapped), X.reshape(4, 2, 8)
    lean = jrc.recompute_segments(plain, NAMES)
    assert count(lean, "all-reduce", W, parts) == count(plain, "all-reduce", W, parts)
    assert largest_error(jax.value_and_grad(lean)(W, parts), want) < 1e-6


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.sin(lax.psum(nn.Dense(8)(jnp.sin(x)), "a") * x)


@pytest.mark.slow
def test_collectives_in_a_module():
    mesh = Mesh(jax.devices()[:4], ("a",))
    params = {"params": {"Dense_0": {"kernel": W, "bias": W[0]}}}

    def loss(module, params, x):
        def local(params, x):
            params = lax.pcast(params, "a", to="varying")
            return lax.psum(jnp.sum(module.apply(params, x) ** 2), "a")

        return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("a")), out_specs=P())(params, x)

    plain = functools.partial(loss, Block())
    lean = functools.partial(loss, jrc.recompute_module(Block()))
    again = functools.partial(loss, jrc.recompute_module(Block(), recompute_collectives=True))
    counts = [count(f, "all-reduce", params, X) for f in (plain, lean, again)]
    assert counts[0] == counts[1] < counts[2]
    want = jax.value_and_grad(plain)(params, X)
    assert largest_error(jax.value_and_grad(lean)(params, X), want) < 1e-6
