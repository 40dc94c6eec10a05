"""EF21 with momentum: its formulas, conservation, equal replicas, skipped steps, training."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jrc
from tests.dgc.replicas import AXIS, VIAS, normal, some_params, stepper, trajectory
from tests.train.tasks import same_bits

REPLICAS, STEPS, ETA, DENSE, SPARSITY, LEAST = 4, 6, 0.25, 2, 0.9, 100


def transform(**options):
    given = {"sparsity": SPARSITY, "rampup_begin_step": DENSE, "min_size": LEAST, "axis_name": AXIS}
    return jrc.scale_by_ef21(ETA, **(given | {"exchange": "allgather"} | options))


class Published:
    """Algorithm 1 of arXiv:2305.15155 in NumPy, float64, with g_i of each replica."""

    def __init__(self, size, compressed):
        self.v, self.g_i = np.zeros((REPLICAS, size)), np.zeros((REPLICAS, size))
        self.g, self.compressed, self.step = np.zeros(size), compressed, 0

    def update(self, gradients):
        if not self.compressed or self.step < DENSE:
            gradients = np.broadcast_to(gradients.mean(0), gradients.shape)
        eta = 1.0 if self.step == 0 else ETA
        self.v = (1 - eta) * self.v + eta * gradients
        c = np.zeros_like(self.v)
        for i, change in enumerate(self.v - self.g_i):
            k = change.size
            if self.compressed and self.step >= DENSE:
                k = max(1, int(np.float64(change.size) * (1 - np.float64(SPARSITY))))
            chosen = np.argsort(-np.abs(change), kind="stable")[:k]
            c[i, chosen] = change[chosen]
        self.g_i, self.g = self.g_i + c, self.g + c.mean(0)
        self.step += 1
        return self.g


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("via", VIAS)
def test_the_published_algorithm(via):
    params = some_params()
    gradients = normal(3, params, STEPS, REPLICAS)
    path, state = trajectory(transform(), params, gradients, via)
    for name, leaf in params.items():
        own = Published(leaf.size, leaf.size >= LEAST)
        total = np.asarray(leaf, np.float64).ravel()
        for t in range(STEPS):
            total = total + own.update(np.float64(gradients[name][t]).reshape(REPLICAS, -1))
            for rank in range(REPLICAS):
                found = path[name][t, rank]
                assert found.tobytes() == path[name][t, 0].tobytes()
            np.testing.assert_allclose(found.ravel(), total, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(state.velocity[name].ravel(), own.g, rtol=1e-5, atol=1e-5)
        if leaf.size >= LEAST:
            flat = lambda rows: np.asarray(rows).reshape(REPLICAS, -1)  # noqa: E731
            np.testing.assert_allclose(flat(state.u[name]), own.v, rtol=1e-5, atol=1e-5)
            left = own.v - own.g_i
            np.testing.assert_allclose(flat(state.v[name]), left, rtol=1e-4, atol=1e-5)


@pytest.mark.slow(every=True)
@pytest.mark.exhaustive(after=2)
@pytest.mark.parametrize(
    "options",
    [
        {"wire": "fp8", "selector": "two_stage"},
        {"exchange": "sharded", "wire": "bf16"},
        {"exchange": "dense"},
        {"exchange": "auto", "sparsity": (0.5, 0.99), "rampup_step": 3, "selector": "global"},
    ],
    ids=str,
)
def test_the_estimate_and_what_is_kept_are_the_average(options):
    params = {"w": jnp.zeros((30, 70)), "b": jnp.zeros(5)}
    gradients = normal(5, params, 5, REPLICAS)
    state, step = stepper(transform(**options), params)
    average = {name: np.zeros(leaf.shape) for name, leaf in params.items()}
    for t in range(5):
        updates, state = step(jax.tree.map(lambda x: x[t], gradients), state, params)  # noqa: B023
        for name, found in updates.items():
            eta = 1.0 if t == 0 else ETA
            mean = np.float64(gradients[name][t]).mean(0)
            average[name] = (1 - eta) * average[name] + eta * mean
            left = np.float64(state.v[name]).mean(0) if name == "w" else 0.0
            np.testing.assert_allclose(found + left, average[name], rtol=1e-4, atol=1e-5)
    assert 0 < float(state.density) < 0.6 and float(state.bytes_sent) > 0


def test_all_entries_of_the_last_gradient_are_the_mean_gradient():
    params = {"w": jnp.zeros((8, 16))}
    gradients = normal(7, params, 2, REPLICAS)
    state, step = stepper(
        jrc.scale_by_ef21(1.0, sparsity=0.0, rampup_begin_step=0, min_size=0, axis_name=AXIS),
        params,
    )
    for t in range(2):
        updates, state = step({"w": gradients["w"][t]}, state, params)
        np.testing.assert_allclose(updates["w"], gradients["w"][t].mean(0), atol=1e-6)


def test_a_gradient_that_is_not_finite_changes_nothing():
    params = {"w": jnp.zeros((8, 16)), "b": jnp.zeros(3)}
    state, step = stepper(transform(), params)
    good = jax.tree.map(lambda x: x[0], normal(7, params, 1, REPLICAS))
    bad = {**good, "w": good["w"].at[2, 1, 1].set(jnp.nan)}
    for _ in range(2):
        updates, new = step(bad, state, params)
        assert int(new.skipped) == int(state.skipped) + 1 and type(new) is jrc.EF21State
        assert not any(np.asarray(x).any() for x in jax.tree.leaves(updates))
        kept = lambda s: (s.step, s.u, s.v, s.velocity)  # noqa: E731
        assert same_bits(kept(new), kept(state))
        _, state = step(good, state, params)


def test_one_packed_gather():
    params = {"w": jnp.zeros((64, 64)), "o": jnp.zeros(5000)}
    tx = jrc.scale_by_ef21(0.1, rampup_begin_step=0, min_size=0, axis_name=AXIS)
    state, step = stepper(tx, params, check_vma=False)
    rows = jax.tree.map(lambda x: jnp.zeros((REPLICAS, *x.shape)), params)
    text = step.lower(rows, state, params).compile().as_text()
    gathers = re.findall(r"= u32\[(\d+),(\d+)\]\S* all-gather\(", text)
    assert gathers == [("4", str(2 * (4096 // 100 + 5000 // 100)))]
    assert "f32[64,64]{1,0} all-reduce" not in text


def adamw(axis="data", **options):
    options = {"rampup_begin_step": 2, "min_size": 100, "exchange": "allgather"} | options
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        jrc.scale_by_ef21(0.1, sparsity=0.9, axis_name=axis, **options),
        optax.scale_by_adam(b1=0.0),
        optax.add_decayed_weights(1e-3),
        optax.scale_by_learning_rate(3e-3),
    )


def loss_fn(params, batch, key):
    x, y = batch
    if jax.typeof(params["w"]).sharding.mesh.explicit_axes:
        params = jax.tree.map(lambda p: jax.sharding.reshard(p, P()), params)
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["o"] - y) ** 2)


def weights():
    draw = np.random.default_rng(0)
    shapes = {"w": (16, 32), "o": (32, 4)}
    return {k: 0.3 * draw.normal(size=s).astype(np.float32) for k, s in shapes.items()}


def batch(i):
    x = np.random.default_rng(i).normal(size=(32, 16)).astype(np.float32)
    return x, np.sin(3 * x[:, :4])


def run(state, step, numbers):
    losses = []
    for i in numbers:
        state, info = step(state, batch(i))
        losses.append(float(info.loss))
    return state, losses, info


@pytest.mark.slow
def test_a_run_is_saved_resumed_and_resharded(tmp_path):
    tx, mesh = adamw(), Mesh(jax.devices()[:REPLICAS], ("data",))
    start = functools.partial(jrc.init_state, weights(), tx, jax.random.key(0))
    step = jrc.make_train_step(loss_fn, tx, mesh=mesh, donate=False)
    state, losses, info = run(start(mesh=mesh), step, range(60))
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])
    assert 0.05 < float(info.density) < 0.11 and float(info.norm_kept) > 0
    assert 0 < float(jrc.dgc_stats(state.opt_state).bytes_sent) == float(info.bytes_sent)
    for leaf in jax.tree.leaves((state.params, state.opt_state[1].velocity)):
        assert len({np.asarray(part.data).tobytes() for part in leaf.addressable_shards}) == 1
    jrc.save(tmp_path, state)
    back = jrc.restore(tmp_path, start(mesh=mesh))
    assert same_bits(run(back, step, range(60, 63))[0], run(state, step, range(60, 63))[0])
    fewer = Mesh(jax.devices()[:2], ("data",))
    half = jrc.reshard(state, 2, mesh=fewer)
    old, new = state.opt_state[1], half.opt_state[1]
    assert type(new) is jrc.EF21State
    for name in ("w", "o"):
        left = np.asarray(new.u[name] - new.v[name]).mean(0)
        np.testing.assert_allclose(left, old.velocity[name], atol=1e-5)
    run(half, jrc.make_train_step(loss_fn, tx, mesh=fewer), range(60, 62))


@pytest.mark.parametrize(
    "kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.slow)]
)
def test_replicas_that_are_split(kind):
    shape, names = (2, 2), ("data", "fsdp")
    mesh = jax.make_mesh(shape, names, axis_types=(kind,) * 2, devices=jax.devices()[:4])
    specs = {"w": P(None, "fsdp"), "o": P("fsdp")}
    own = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), weights(), specs)
    tx = adamw(selector="blocked")
    state = jrc.init_state(own, tx, jax.random.key(0), mesh=mesh)
    ef21 = state.opt_state[1]
    assert ef21.u["w"].sharding.spec == P("data", None, "fsdp")
    assert ef21.velocity["w"].sharding.spec == P(None, "fsdp")
    state, losses, _ = run(state, jrc.make_train_step(loss_fn, tx, mesh=mesh), range(12))
    ef21 = state.opt_state[1]
    for name in ("w", "o"):
        left = np.asarray(ef21.u[name]) - np.asarray(ef21.v[name])
        np.testing.assert_allclose(left.mean(0), ef21.velocity[name], atol=1e-5)
    assert losses[-1] < losses[0]


def test_states_of_other_transforms_are_refused():
    params = {"w": jnp.zeros((8, 16))}
    ef21, dgc = transform(axis_name=None), jrc.scale_by_dgc(min_size=0)
    with pytest.raises(TypeError, match="scale_by_ef21: state must be an EF21State, got DGCState"):
        ef21.update(params, dgc.init(params), params)
    with pytest.raises(TypeError, match="scale_by_dgc: state must be a DGCState, got EF21State"):
        dgc.update(params, ef21.init(params), params)
