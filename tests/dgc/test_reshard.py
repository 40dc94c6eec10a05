"""Another number of replicas: means, layouts, placements, and errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jrc
from jrc.dgc._reshard import shares_of
from tests.dgc.replicas import AXIS, assert_bit_equal

PARAMS = {"w": jnp.ones((6, 4)), "b": jnp.ones(3), "n": jnp.arange(2)}


def on(devices, kind=AxisType.Auto):
    return Mesh(jax.devices()[:devices], (AXIS,), axis_types=(kind,))


def state_of(tx, replicas, params=PARAMS, seed=0):
    """Return a whole state of `replicas`, in NumPy, with small integers in all local leaves."""
    rng = np.random.default_rng(seed)
    state = tx.init(params)
    specs = jrc.dgc_specs(state, AXIS)

    def filled(x, spec):
        if spec == P():
            return np.asarray(x)
        shape = (replicas * x.shape[0], *x.shape[1:])
        return rng.integers(-99, 99, shape).astype(x.dtype)

    return jax.tree.map(filled, state, specs)


def means(state, replicas):
    """Return the mean over replicas of every leaf that differs between them, in float64."""
    specs = jax.tree.leaves(jrc.dgc_specs(state, AXIS))
    return [
        np.asarray(x, np.float64).reshape(replicas, -1).mean(0)
        for x, spec in zip(jax.tree.leaves(state), specs, strict=True)
        if spec == P(AXIS)
    ]


@pytest.mark.parametrize(
    ("old", "new", "shares"),
    [
        (2, 4, (((0, 1.0),), ((0, 1.0),), ((1, 1.0),), ((1, 1.0),))),
        (4, 2, (((0, 0.5), (1, 0.5)), ((2, 0.5), (3, 0.5)))),
        (4, 3, (((0, 0.75), (1, 0.25)), ((1, 0.5), (2, 0.5)), ((2, 0.25), (3, 0.75)))),
        (3, 1, (((0, 1 / 3), (1, 1 / 3), (2, 1 / 3)),)),
        (2, 2, (((0, 1.0),), ((1, 1.0),))),
    ],
)
def test_shares_golden(old, new, shares):
    assert shares_of(old, new) == shares


@pytest.mark.parametrize("old", range(1, 10))
@pytest.mark.parametrize("new", range(1, 10))
def test_every_old_row_has_the_same_total_weight(old, new):
    shares = shares_of(old, new)
    used = np.zeros(old)
    for parts in shares:
        assert np.isclose(sum(weight for _, weight in parts), 1)
        for rank, weight in parts:
            used[rank] += weight
    np.testing.assert_allclose(used, new / old)


@settings(deadline=None, max_examples=80)
@given(
    old=st.integers(1, 9),
    new=st.integers(1, 9),
    rows=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=5),
    seed=st.integers(0, 2**16),
)
def test_the_mean_over_replicas_stays(old, new, rows, seed):
    rng = np.random.default_rng(seed)
    v = (np.float32(rows) * rng.normal(size=(old, len(rows)))).astype(np.float32)
    state = jrc.scale_by_dgc(min_size=0).init(jnp.zeros(len(rows)))
    state = state._replace(u=v[:, ::-1].copy(), v=v)
    after = jrc.reshard_dgc(state, new)
    assert after.v.shape == (new, len(rows)) and after.v.dtype == np.float32
    bound = 1e-6 * np.abs(v).max(0) + 1e-30
    assert (np.abs(after.v.mean(0, np.float64) - v.mean(0, np.float64)) <= bound).all()
    assert_bit_equal(after.u, after.v[:, ::-1])


@pytest.mark.parametrize(("old", "new"), [(1, 8), (2, 4), (8, 2), (4, 1), (4, 4), (4, 8)])
def test_powers_of_two_are_exact(old, new):
    state = state_of(jrc.scale_by_dgc(min_size=10), old)
    assert_bit_equal(means(jrc.reshard_dgc(state, new), new), means(state, old))


def wrapped(wrap):
    tx = jrc.dgc_momentum(0.1, 0.9, 0, axis_name=AXIS, min_size=10)
    return {
        "plain": tx,
        "chain": optax.chain(optax.clip(1.0), tx, optax.scale_by_adam()),
        "masked": optax.masked(tx, {"w": True, "b": True, "n": False}),
        "injected": optax.inject_hyperparams(lambda learning_rate: tx)(0.1),
        "if finite": optax.apply_if_finite(tx, 3),
        "every second": optax.MultiSteps(tx, 2),
        "every second, masked": optax.MultiSteps(
            optax.masked(tx, {"w": True, "b": True, "n": False}), 2
        ),
    }[wrap]


WRAPS = ("plain", "chain", "masked", "injected", "if finite", "every second")


@pytest.mark.parametrize("wrap", [*WRAPS, "every second, masked"])
@pytest.mark.parametrize("new", [8, 2, 3])
def test_every_state_with_a_dgc_state_in_it(wrap, new):
    tx = wrapped(wrap)
    state = {"opt": state_of(tx, 4), "params": PARAMS, "none": None, "step": 7}
    after = jrc.reshard_dgc(state, new)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    for kept, moved in zip(means(state, 4), means(after, new), strict=True):
        # MultiSteps accumulates the gradient of an integer leaf as an integer.
        np.testing.assert_allclose(moved, kept, rtol=1e-6, atol=1 if "every" in wrap else 1e-5)
    specs = jrc.dgc_specs(state, AXIS)
    shared = jax.tree.map(
        lambda x, y, spec: spec != P() or bool(np.all(x == y)), state, after, specs
    )
    assert jax.tree.all(shared)
    own = [spec == P(AXIS) for spec in jax.tree.leaves(specs)]
    expected = jax.tree.leaves(jax.eval_shape(tx.init, PARAMS))
    found = jax.tree.leaves(after["opt"])
    local = [spec == P(AXIS) for spec in jax.tree.leaves(specs["opt"])]
    assert any(own)
    for want, got, mine in zip(expected, found, local, strict=True):
        assert got.shape == ((new * want.shape[0], *want.shape[1:]) if mine else want.shape)


def test_gradients_that_multi_steps_accumulates_keep_their_mean():
    state = state_of(optax.MultiSteps(wrapped("plain"), 2), 4, {"w": jnp.ones((6, 4))})
    after = jrc.reshard_dgc(state, 2)
    gathered = state.acc_grads["w"].reshape(4, 6, 4)
    want = (gathered[0::2] + gathered[1::2]) / 2
    np.testing.assert_array_equal(after.acc_grads["w"].reshape(2, 6, 4), want)


def test_half_precision_is_mixed_in_float32():
    params = {"w": jnp.ones((4, 4), jnp.bfloat16)}
    state = state_of(optax.MultiSteps(wrapped("plain"), 2), 3, params)
    state = state._replace(acc_grads={"w": state.acc_grads["w"].astype(jnp.bfloat16)})
    after = jrc.reshard_dgc(state, 1).acc_grads["w"]
    want = state.acc_grads["w"].astype(np.float64).reshape(3, 4, 4).mean(0)
    assert after.dtype == jnp.bfloat16
    np.testing.assert_allclose(after.astype(np.float64), want, rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("wrap", WRAPS)
def test_shapes_numpy_and_jax_agree(wrap):
    state = state_of(wrapped(wrap), 4)
    plain = jrc.reshard_dgc(state, 3)
    arrays = jrc.reshard_dgc(jax.tree.map(jnp.asarray, state), 3)
    traced = jax.jit(lambda s: jrc.reshard_dgc(s, 3))(state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), arrays, plain)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), traced, plain)
    shapes = jrc.reshard_dgc(jax.eval_shape(lambda: state), 3)
    avals = lambda tree: jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree)  # noqa: E731
    assert avals(shapes) == avals(plain) == avals(arrays)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("devices", [(4, 2), (4, 8), (4, 4), (1, 8)])
def test_placed_on_a_mesh(devices, kind):
    before, after = (on(number, kind) for number in devices)
    params = {"w": jnp.ones((6, 4)), "b": jnp.ones(3)}
    state = jrc.init_state(params, wrapped("plain"), jax.random.key(0), mesh=before)
    rows = np.arange(24.0 * devices[0], dtype=np.float32).reshape(devices[0], 6, 4)
    rows = jax.device_put(rows, state.opt_state[0].v["w"].sharding)
    own = state.opt_state[0]
    state = state._replace(opt_state=(own._replace(v=own.v | {"w": rows}), *state.opt_state[1:]))
    found = jrc.reshard_dgc(state, devices[1], mesh=after)
    want = jrc.init_state(params, wrapped("plain"), jax.random.key(0), mesh=after)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), found) == jax.tree.map(
        lambda x: (x.shape, x.dtype, x.sharding), want
    )
    v = np.asarray(found.opt_state[0].v["w"])
    np.testing.assert_allclose(v.mean(0), np.asarray(rows).mean(0), rtol=1e-6)


def test_rows_that_the_axis_does_not_divide_are_split_along_another_dimension():
    state = jrc.scale_by_dgc(min_size=0).init({"w": jnp.ones(24), "x": jnp.ones(5)})
    shapes = jax.eval_shape(lambda: state)
    for tree in (state, shapes):
        found = jrc.reshard_dgc(tree, 3, mesh=on(2))
        assert found.v["w"].sharding.spec == P(None, AXIS) and found.v["w"].shape == (3, 24)
        assert found.v["x"].sharding.spec == P() and found.step.sharding.spec == P()
    assert jrc.reshard_dgc(shapes, 4, mesh=on(2)).u["x"].sharding == NamedSharding(on(2), P(AXIS))


def test_a_state_without_compressed_leaves_stays():
    state = jrc.scale_by_dgc(min_size=1000).init(PARAMS)
    assert_bit_equal(jrc.reshard_dgc(state, 3), state)


GOOD = jrc.scale_by_dgc(min_size=10).init(PARAMS)


@pytest.mark.parametrize(
    ("state", "replicas", "error", "message"),
    [
        (
            optax.EmptyState(),
            2,
            ValueError,
            "must have a DGCState in it, got none in EmptyState",
        ),
        (GOOD, 0, ValueError, "num_replicas must be a whole number >= 1, got 0"),
        (GOOD, 2.0, TypeError, "num_replicas must be a whole number >= 1, got 2.0. Pass mesh"),
        (GOOD, True, TypeError, "num_replicas must be a whole number >= 1, got True"),
        (
            (GOOD, GOOD._replace(v={**GOOD.v, "w": jnp.zeros((4, 24))})),
            2,
            ValueError,
            "u and v of all leaves must have one row for each replica, got 1 and 4 rows. Pass",
        ),
        (
            state_of(optax.MultiSteps(wrapped("plain"), 2), 4)._replace(acc_grads=PARAMS),
            2,
            ValueError,
            "the first axis of .acc_grads['b'] must be a multiple of 4, the rows of u and v, got",
        ),
        (
            optax.MultiSteps(jrc.scale_by_dgc(), 2).init(PARAMS),
            2,
            ValueError,
            "got none, while .acc_grads['b'] differs between replicas. Build",
        ),
    ],
)
def test_states_that_cannot_be_resharded(state, replicas, error, message):
    with pytest.raises(error, match=re.escape(message)) as raised:
        jrc.reshard_dgc(state, replicas)
    assert str(raised.value).startswith("jrc.reshard_dgc: ")


def test_meshes_that_do_not_fit():
    with pytest.raises(ValueError, match="an axis of the mesh, got 'x'. The axes are 'data'"):
        jrc.reshard_dgc(GOOD, 2, mesh=on(2), axis_name="x")
    with pytest.raises(TypeError, match="mesh must be a jax.sharding.Mesh or None, got int. Write"):
        jrc.reshard_dgc(GOOD, 2, mesh=2)
