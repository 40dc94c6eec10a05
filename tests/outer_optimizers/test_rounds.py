"""Rounds against the formulas in NumPy, what is sent and kept, and values that check themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrc
from tests.outer_optimizers import reference

SHAPES = {"w": (70, 130), "b": (300,), "s": ()}


encode = jax.jit(lambda outer, difference, local: outer.encode(difference, local), static_argnums=0)
decode = jax.jit(lambda outer, *given: outer.decode(*given), static_argnums=0)


def drawn(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return {n: (scale * rng.normal(size=s) ** 3).astype(np.float32) for n, s in SHAPES.items()}


def one_round(outer, theta, own, local, shared, valid=None):
    difference = [jax.tree.map(lambda a, b: jnp.asarray(a - b), theta, mine) for mine in own]
    found = [encode(outer, d, e) for d, e in zip(difference, local, strict=True)]
    messages = [each.message for each in found]
    valid = jnp.ones(len(own), bool) if valid is None else jnp.asarray(valid)
    if outer.collective == "all_gather":
        arrived = jnp.stack(messages)
    else:
        arrived = sum(m for m, is_valid in zip(messages, valid, strict=True) if is_valid)
    theta = jax.tree.map(jnp.asarray, theta)
    params, shared = decode(outer, theta, shared, arrived, valid)
    return params, shared, found


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("mean", ["all", "senders"])
def test_sparseloco_is_its_formula(mean):
    outer = jrc.SparseLoCo(2, density=1 / 32, chunk=1024, outer_lr=0.8, mean=mean)
    theta, own = drawn(0), [drawn(i, 0.1) for i in (1, 2, 3)]
    local, shared = [jax.tree.map(jnp.asarray, drawn(i, 0.3)) for i in (4, 5, 6)], None
    params, _, found = one_round(outer, theta, own, local, shared)
    for name in SHAPES:
        want, kept = reference.sparseloco_round(
            theta[name],
            [mine[name] for mine in own],
            [np.asarray(e[name]) for e in local],
            chunk=1024,
            density=1 / 32,
            decay=0.95,
            outer_lr=0.8,
            over_senders=mean == "senders",
        )
        np.testing.assert_allclose(params[name], want, rtol=0, atol=2e-5)
        for each, e in zip(found, kept, strict=True):
            np.testing.assert_allclose(each.local[name], e, rtol=0, atol=2e-5)
    squares = [sum(float(jnp.sum(x * x)) for x in each.local.values()) for each in found]
    np.testing.assert_allclose([float(each.kept.sum()) for each in found], squares, rtol=1e-5)
    of_leaves = [float(jnp.sum(x * x)) for x in jax.tree.leaves(found[0].local)]
    np.testing.assert_allclose(found[0].kept, of_leaves, rtol=1e-5)


@pytest.mark.parametrize("nesterov", [True, False])
def test_diloco_is_its_formula(nesterov):
    outer = jrc.DiLoCo(2, nesterov=nesterov)
    theta, own = drawn(0), [drawn(i) for i in (1, 2, 3)]
    _, shared = outer.init(theta)
    momentum = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for _ in range(2):
        before = {name: np.asarray(x) for name, x in theta.items()}
        theta, shared, _ = one_round(outer, before, own, [None] * 3, shared)
        for name in SHAPES:
            want, momentum[name] = reference.diloco_round(
                before[name],
                [mine[name] for mine in own],
                momentum[name],
                outer_lr=0.7,
                outer_momentum=0.9,
                nesterov=nesterov,
            )
            np.testing.assert_allclose(theta[name], want, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
def test_four_bits_of_diloco_are_close_and_an_eighth_of_the_words():
    outer = jrc.DiLoCo(2, wire="4bit")
    theta, own = drawn(0), [drawn(1), drawn(2)]
    _, shared = outer.init(theta)
    got, _, found = one_round(outer, theta, own, [None] * 2, shared)
    want, _, _ = one_round(jrc.DiLoCo(2), theta, own, [None] * 2, shared)
    sizes = [int(np.prod(shape)) for shape in SHAPES.values() if np.prod(shape)]
    chunks = [-(-size // 4096) for size in sizes]
    entries = sum(n * -(-size // n) for n, size in zip(chunks, sizes, strict=True))
    words = sum(chunks) + -(-entries // 16) * 2
    assert found[0].message.size == outer.message_words(theta) == words
    step = np.abs(np.asarray(want["w"]) - theta["w"]).max()
    assert np.abs(np.asarray(got["w"] - want["w"])).max() < 0.25 * step


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("wire", ["2bit", "4bit", "bf16", "f32"])
@pytest.mark.parametrize("levels", ["leaf", "chunk"])
def test_what_is_sent_and_what_is_kept_is_what_was_accumulated(wire, levels):
    outer = jrc.SparseLoCo(2, wire=wire, levels=levels, error_decay=1.0)
    total, received = (
        {n: np.zeros(s) for n, s in SHAPES.items()},
        jax.tree.map(np.zeros_like, drawn(0)),
    )
    local, _ = outer.init(drawn(0))
    for i in range(4):
        step = drawn(10 + i)
        total = {name: total[name] + step[name] for name in SHAPES}
        found = encode(outer, jax.tree.map(jnp.asarray, step), local)
        zero = jax.tree.map(jnp.zeros_like, step)
        got, _ = decode(outer, zero, None, found.message[None], jnp.ones(1, bool))
        received = {name: received[name] - np.asarray(got[name]) for name in SHAPES}
        local = found.local
    for name in SHAPES:
        both = received[name] + np.asarray(local[name])
        np.testing.assert_allclose(both, total[name], rtol=0, atol=1e-4)


def test_entries_without_worth_are_not_sent():
    """Rows that never change get no noise from levels that are fitted to the others."""
    outer = jrc.SparseLoCo(2)
    difference = jnp.zeros((256, 64)).at[:64].set(jax.random.normal(jax.random.key(0), (64, 64)))
    found = encode(outer, difference, jnp.zeros((256, 64)))
    got, _ = decode(outer, jnp.zeros((256, 64)), None, found.message[None], jnp.ones(1, bool))
    assert int((got[:64] != 0).sum()) == 64 and not bool(got[64:].any())
    assert not bool(found.local[64:].any())


@pytest.mark.slow(after=3, every=True)
@pytest.mark.parametrize("wire", ["2bit", "4bit", "f32"])
@pytest.mark.parametrize("changed", range(4))
@pytest.mark.parametrize("options", [{"density": 1 / 4096}, {"density": 3 / 4096}, {"chunk": 64}])
def test_parameters_without_a_gradient_stay_where_they_are(options, changed, wire):
    """In chunks of which nothing, or less than what is sent of them, has changed."""
    outer = jrc.SparseLoCo(2, wire=wire, **options)
    difference = jnp.zeros((128, 64)).at[0, 3].set(1.0).at[64, :changed].set(2.0)
    local = jnp.zeros((128, 64))
    theta, moved = jnp.zeros((128, 64)), difference != 0
    for _ in range(3):
        found = encode(outer, difference, local)
        theta, _ = decode(outer, theta, None, found.message[None], jnp.ones(1, bool))
        local = found.local
        assert not bool((theta != 0)[~moved].any()) and not bool(local[~moved].any())
    assert bool((theta != 0)[0, 3])


def test_an_entry_that_carries_nothing_has_no_sender():
    outer = jrc.SparseLoCo(2, density=1 / 32, mean="senders")
    theta = {"w": np.zeros(16, np.float32)}
    own = [{"w": np.zeros(16, np.float32)} for _ in range(2)]
    own[0]["w"][0] = -3.0
    none = [jnp.zeros(16)] * 2
    params, _, _ = one_round(outer, theta, own, [{"w": e} for e in none], None)
    assert params["w"].tolist() == [-3.0] + [0.0] * 15


def test_a_replica_that_is_not_valid_is_left_out_whatever_it_sends():
    outer = jrc.SparseLoCo(2)
    theta, own = drawn(0), [drawn(1), drawn(2), jax.tree.map(lambda x: x * np.nan, drawn(3))]
    local = [outer.init(theta)[0]] * 3
    got, _, _ = one_round(outer, theta, own, local, None, [True, True, False])
    want, _, _ = one_round(outer, theta, own[:2], local[:2], None)
    for name in SHAPES:
        np.testing.assert_array_equal(got[name], want[name])


def test_the_bits_of_a_parameter_at_the_defaults():
    params = {
        "a": jax.ShapeDtypeStruct((512, 1024), "float32"),
        "b": jax.ShapeDtypeStruct((8192,), "float32"),
    }
    size = 512 * 1024 + 8192
    outer = jrc.SparseLoCo()
    assert 32 * (outer.message_words(params) - 2 * 2) == 0.21875 * size
    assert outer.entries_sent(params) == size // 64
    assert jrc.SparseLoCo(density=1, wire="f32").message_words(params) == size
    assert jrc.DiLoCo().message_words(params) == size


def test_padding_is_no_entry():
    params = {"w": jnp.zeros((65, 65)), "b": jnp.zeros(5001)}
    assert jrc.SparseLoCo(density=1).entries_sent(params) == 65 * 65 + 5001


def test_leaves_without_entries_and_of_few_bits():
    outer = jrc.SparseLoCo(2, density=1, wire="f32")
    theta = {"none": jnp.zeros((0, 3)), "half": jnp.ones((4,), jnp.bfloat16)}
    local, _ = outer.init(theta)
    difference = jax.tree.map(lambda x: 0.5 * jnp.ones(x.shape), theta)
    found = encode(outer, difference, local)
    got, _ = decode(outer, theta, None, found.message[None], jnp.ones(1, bool))
    assert got["none"].shape == (0, 3) and got["half"].dtype == jnp.bfloat16
    assert got["half"].tolist() == [0.5] * 4


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    "outer", [jrc.DiLoCo(2), jrc.DiLoCo(2, wire="4bit"), jrc.SparseLoCo(2, density=1 / 8)], ids=str
)
def test_what_becomes_of_a_leaf_does_not_depend_on_others(outer):
    """So that devices of a replica that share one leaf, and not another, keep it equal."""
    found = []
    for scale in (1.0, 10.0):
        own = [drawn(5), drawn(6)]
        for mine in own:
            mine["w"] = scale * mine["w"]
        local, shared = outer.init(jax.tree.map(jnp.asarray, drawn(0)))
        params, _, each = one_round(outer, drawn(0), own, [local] * 2, shared)
        kept = [] if local is None else [x.local[name] for x in each for name in ("b", "s")]
        found.append([np.asarray(x) for x in (params["b"], params["s"], *kept)])
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*found, strict=True))
