"""Random masks and noise in chunks: those of the whole, and no bits are drawn outside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jrc
from jrc._jaxpr import independent_axes, inline_all

DRAW = np.random.default_rng(0)
KEY = jax.random.key(3)


def normal(*shape):
    return jnp.asarray(DRAW.normal(size=shape) / 8, jnp.float32)


X, P, LAYERS = (
    normal(512, 16),
    (normal(16, 1024), normal(1024, 16)),
    (normal(3, 16, 1024), normal(3, 1024, 16)),
)


def dropped(x, key):
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0.0)


def mlp(p, x, key):
    return jnp.mean((dropped(jax.nn.gelu(x @ p[0]), key) @ p[1]) ** 2)


def noise(p, x, key):
    wide = x @ p[0]
    wide = wide + jax.random.normal(key, wide.shape)
    gumbel = jax.random.gumbel(jax.random.fold_in(key, 1), wide.shape)
    return jnp.mean(jax.nn.logsumexp(wide + gumbel, axis=1))


def per_example(p, x, key):
    keys = jax.random.split(key, len(x))
    one = lambda row, key: jnp.sum(dropped(jax.nn.gelu(row @ p[0]), key) @ p[1]) ** 2  # noqa: E731
    return jnp.mean(jax.vmap(one)(x, keys))


def blocks(p, x, key):
    @jax.checkpoint
    def block(x, key):
        return x + dropped(jax.nn.gelu(x @ p[0]), key) @ p[1]

    for i in range(2):
        x = block(x, jax.random.fold_in(key, i))
    return jnp.mean(x**2)


def scanned(p, x, key):
    def body(carry, w):
        x, i = carry
        wide = dropped(jax.nn.gelu(x @ w[0]), jax.random.fold_in(key, i))
        return (x + wide @ w[1], i + 1), None

    (x, _), _ = jax.lax.scan(body, (x, 0), p)
    return jnp.mean(x**2)


def attention(p, x, key):
    scores = jax.nn.softmax((x @ p[0][:, :64]) @ (x @ p[0][:, 64:128]).T)
    return jnp.mean((dropped(scores, key) @ (x @ p[0][:, :16])) ** 2)


def peak(fn, *args):
    memory = jax.jit(jax.value_and_grad(fn)).lower(*args).compile().memory_analysis()
    return memory.temp_size_in_bytes


def jittered(w, x, key):
    x = x + jax.random.normal(key, x.shape)
    for each in w:
        x = jnp.tanh(x @ each)
    return jnp.mean(x**2)


def denoised(w, x, key):
    added = jax.random.normal(key, x.shape)
    h = x + added
    for each in w:
        h = h + jax.nn.gelu(h @ each)
    return jnp.mean((h - added) ** 2)


def jittered_in_a_loop(w, x, key):
    def body(carry, each):
        x, key = carry
        key, own = jax.random.split(key)
        return (x + jnp.tanh((x + jax.random.normal(own, x.shape)) @ each), key), None

    (x, _), _ = jax.lax.scan(body, (x, key), jnp.stack(w))
    return jnp.mean(x**2)


def assert_chunks_are_the_whole(loss, *args):
    whole = peak(loss, *args)
    own = 2 * sum(x.nbytes for x in jax.tree.leaves(args[0])) + args[1].nbytes
    plan = jrc.plan(loss, *args, budget=own + whole // 6)
    assert plan.chunks and peak(plan.apply(loss), *args) < whole // 5
    value, gradients = jax.jit(jax.value_and_grad(loss))(*args)
    found, planned = jax.jit(jax.value_and_grad(plan.apply(loss)))(*args)
    np.testing.assert_allclose(found, value, rtol=1e-6)
    for got, wanted in zip(jax.tree.leaves(planned), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=3e-6 * np.abs(wanted).max())


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("loss", [mlp, noise, per_example, blocks, scanned, attention])
def test_masks_and_noise_are_those_of_the_whole(loss):
    assert_chunks_are_the_whole(loss, LAYERS if loss is scanned else P, X, KEY)


@pytest.mark.parametrize("loss", [jittered, denoised, jittered_in_a_loop])
def test_noise_on_the_input_is_drawn_in_the_chunks_of_the_loss(loss):
    """The inverse of the error function is dear: it is made inside, as its region has it."""
    assert_chunks_are_the_whole(loss, list(normal(3, 64, 64)), normal(2048, 64), KEY)


@pytest.mark.parametrize("loss", [mlp, per_example, scanned])
@pytest.mark.parametrize("chunks", [4, 7])
def test_chunks_by_hand(loss, chunks):
    """Of 7 chunks the last is shorter."""
    args = LAYERS if loss is scanned else P, X, KEY
    if loss is per_example:
        keys = jax.random.split(KEY, len(X))
        one = lambda p, row, key: jnp.sum(dropped(row @ p[0], key) ** 2)  # noqa: E731
        fn = lambda p, x, keys: jnp.sum(jax.vmap(one, (None, 0, 0))(p, x, keys))  # noqa: E731
        args, axes = (P, X, keys), (None, 0, 0)
    else:
        axes = (None, 0, None)
        fn = lambda p, x, key: jnp.sum(loss(p, x, key) * len(X))  # noqa: E731
    lean = jrc.chunked(fn, axes, chunks=chunks)
    wanted, found = jax.jit(jax.grad(fn))(*args), jax.jit(jax.grad(lean))(*args)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=3e-6 * np.abs(want).max())


def test_bits_that_are_not_drawn_by_position_stay_whole():
    """Those of the `rbg` generator depend on the shape of all of them."""
    key = jax.random.key(3, impl="rbg")
    plan = jrc.plan(mlp, P, X, key, budget="8MiB")
    wanted, found = (jax.jit(jax.grad(f))(P, X, key) for f in (mlp, plan.apply(mlp)))
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=3e-6 * np.abs(want).max())
    with pytest.raises(jrc.BudgetError):
        jrc.plan(mlp, P, X, key, budget="1MiB")


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_bits_of_several_keys_stay_whole_where_they_depend_on_how_many_there_are(impl):
    key = jax.random.key(3, impl=impl)
    own = 2 * sum(x.nbytes for x in P) + X.nbytes
    for share in (2, 3):
        budget = own + peak(per_example, P, X, key) // share
        try:
            plan = jrc.plan(per_example, P, X, key, budget=budget)
        except jrc.BudgetError:
            continue
        wanted, found = (
            jax.jit(jax.grad(f))(P, X, key) for f in (per_example, plan.apply(per_example))
        )
        for got, want in zip(found, wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=3e-6 * np.abs(want).max())
    keys = jax.random.split(key, len(X))
    lean = jrc.chunked(lambda x, keys: jax.vmap(dropped)(x, keys), chunks=4)
    with pytest.raises(ValueError, match="random_bits"):
        lean(X, keys)


@pytest.mark.parametrize("checks", [True, False])
def test_a_key_for_each_device(checks):
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])

    def part(p, x, key):
        key = jax.random.fold_in(key, jax.lax.axis_index("data"))
        return jax.lax.pmean(mlp(p, x, key), "data")

    specs = (PartitionSpec(), PartitionSpec("data"), PartitionSpec())
    loss = jax.shard_map(
        part, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=checks
    )
    with jax.set_mesh(mesh):
        whole = peak(loss, P, X, KEY)
        plan = jrc.plan(loss, P, X, KEY, budget=int(0.9 * whole))
        wanted, found = (jax.jit(jax.grad(f))(P, X, KEY) for f in (loss, plan.apply(loss)))
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=3e-6 * np.abs(want).max())


def test_a_region_ends_where_an_explicit_mesh_is_left():
    """JAX draws bits with `out_sharding` in a part of the program on automatic axes."""
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Explicit,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        draw = lambda key: jax.random.uniform(key, (8, 4), out_sharding=sharding)  # noqa: E731
        program = inline_all(jax.make_jaxpr(draw)(KEY).jaxpr)
        (eqn,) = [each for each in program.eqns if each.outvars[0] is program.outvars[0]]
    assert eqn.primitive.name == "reshard" and not independent_axes(eqn)
