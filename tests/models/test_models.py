"""The models: shapes, marks, determinism, and that they learn."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrc
from jrc.models import gpt, mlp

SMALL = gpt.Config(layers=2, heads=2, width=16, length=8, dropout=0.5)


def test_the_default_mlp_is_that_of_paddles_sample():
    config = mlp.Config()
    params = mlp.init(jax.random.key(0), config)
    assert jax.tree.map(jnp.shape, params) == {
        "fc_1": {"w": (32, 128), "b": (128,)}, "pred": {"w": (128, 2), "b": (2,)},
    }  # fmt: skip
    rng = np.random.RandomState(0)
    batch = (rng.random_sample((32, 32)).astype(np.float32), rng.randint(2, size=(32,)))
    loss = functools.partial(mlp.loss, config=config)
    by_hand = (batch[0] @ params["fc_1"]["w"]) @ params["pred"]["w"]
    by_hand = -np.log(np.asarray(jax.nn.softmax(by_hand)))[np.arange(32), batch[1]].mean()
    assert np.isclose(float(loss(params, batch)), by_hand, rtol=1e-5)
    cut = jrc.find_segments(loss, config.boundaries, params, batch)
    assert cut.held == ("fc_1", "pred") and [s.boundary for s in cut.segments] == [
        ("fc_1",), ("pred",),
    ]  # fmt: skip


@pytest.mark.slow
def test_gpt_is_causal_and_marks_its_blocks():
    params = gpt.init(jax.random.key(0), SMALL)
    tokens = jax.random.randint(jax.random.key(1), (1, 8), 0, 256)
    plain = functools.partial(gpt.apply, params, config=SMALL)
    apply = jax.jit(plain)
    changed = tokens.at[0, 5].set((tokens[0, 5] + 1) % 256)
    one, two = apply(tokens), apply(changed)
    assert jnp.array_equal(one[:, :5], two[:, :5]) and not jnp.array_equal(one[:, 5:], two[:, 5:])
    assert one.shape == (1, 8, 256) and apply(tokens[:, :3]).shape == (1, 3, 256)
    cut = jrc.find_segments(lambda t: plain(t), SMALL.boundaries, tokens)
    assert cut.held == ("block_0", "block_1") and cut.crossing == ()


@pytest.mark.slow
def test_gpt_starts_near_the_uniform_distribution():
    config = gpt.Config()
    params = jax.jit(functools.partial(gpt.init, config=config))(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 65), 0, 256)
    loss = jax.jit(functools.partial(gpt.loss, config=config))(params, tokens)
    assert abs(float(loss) - np.log(256)) < 0.05


@pytest.mark.exhaustive
def test_dropout_follows_its_key():
    params = gpt.init(jax.random.key(0), SMALL)
    tokens = jnp.zeros((2, 8), int)
    apply = jax.jit(functools.partial(gpt.apply, params, tokens, SMALL))
    assert jnp.array_equal(apply(key=jax.random.key(1)), apply(key=jax.random.key(1)))
    assert not jnp.array_equal(apply(key=jax.random.key(1)), apply(key=jax.random.key(2)))
    assert not jnp.array_equal(apply(), apply(key=jax.random.key(1)))
    lean = jrc.recompute_segments(gpt.loss, SMALL.boundaries)
    args = (params, jnp.arange(18).reshape(2, 9), jax.random.key(3))
    got, want = (
        jax.jit(jax.grad(functools.partial(f, config=SMALL)))(*args) for f in (lean, gpt.loss)
    )
    errors = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(b).max()), got, want)
    assert max(jax.tree.leaves(errors)) < 1e-6


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: mlp.Config(sizes=(3,)), "an input and an output width at least"),
        (lambda: mlp.Config(sizes=(3, 0)), "all whole numbers >= 1"),
        (lambda: mlp.Config(activation="swish"), "activation must be one of 'identity', 'relu'"),
        (lambda: gpt.Config(heads=3), "heads must divide width, got heads=3, width=128"),
        (lambda: gpt.Config(layers=0), "layers must be a whole number >= 1, got 0"),
        (lambda: gpt.Config(dropout=1.0), r"dropout must lie in \[0, 1\), got 1.0"),
        (
            lambda: gpt.apply(gpt.init(jax.random.key(0), SMALL), jnp.zeros((1, 9), int), SMALL),
            "at most config.length=8 of them in a row, got 9",
        ),
    ],
)
def test_errors(build, text):
    with pytest.raises(ValueError, match=text):
        build()


@pytest.mark.exhaustive(after=1)
@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_scanned_blocks_are_the_unrolled_ones(dropout):
    unrolled = dataclasses.replace(SMALL, dropout=dropout, layers=3)
    scanned = dataclasses.replace(unrolled, scan=True)
    assert scanned.boundaries == ()
    batch, key = jnp.arange(18).reshape(2, 9), jax.random.key(3) if dropout else None
    params = gpt.init(jax.random.key(0), unrolled)
    stacked = gpt.init(jax.random.key(0), scanned)

    def value_and_grad(params, **options):
        loss = functools.partial(gpt.loss, **options)
        return jax.jit(jax.value_and_grad(loss))(params, batch, key)

    value, grads = value_and_grad(params, config=unrolled)
    for loop in (jax.lax.scan, functools.partial(jrc.recompute_scan, segments=3)):
        again, found = value_and_grad(stacked, config=scanned, loop=loop)
        assert abs(float(again - value)) < 1e-6
        blocks = found.pop("blocks")
        found |= {name: jax.tree.map(lambda x, i=i: x[i], blocks)
                  for i, name in enumerate(unrolled.boundaries)}  # fmt: skip
        errors = jax.tree.map(
            lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(b).max()), found, grads
        )
        assert max(jax.tree.leaves(errors)) < 2e-6
