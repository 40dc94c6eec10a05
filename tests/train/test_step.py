"""The train step: every way to run it, what it exchanges, what it reports."""

import collections
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jrc
from tests.train.tasks import REPLICAS, dgc, digits, mesh, same_bits, start


def run(task, tx, steps, **options):
    state, step, batch = start(task, tx, **options)
    infos = []
    for i in range(steps):
        state, info = step(state, batch(i))
        infos.append(info)
    return state, infos


def close(a, b, tolerance):
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.allclose(x, y, rtol=tolerance, atol=tolerance) for x, y in leaves)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["digits", pytest.param("gpt", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("tx", ["dgc", "sgd"])
def test_pmap_equals_shard_map(task, tx):
    tx = dgc() if tx == "dgc" else optax.sgd(0.1, 0.9)
    one, two = (run(task, tx, 8, via=via) for via in ("shard_map", "pmap"))
    assert close(one[0].params, two[0].params, 1e-6)
    assert close(one[0].opt_state, two[0].opt_state, 1e-6)
    assert close(one[1], two[1], 1e-5)


def test_mean_of_gradients_equals_one_device_on_the_whole_batch():
    tx = optax.sgd(0.1, 0.9)
    many, infos = run("digits", tx, 6)
    one, alone = run("digits", tx, 6, via="jit", on=Mesh(jax.devices()[:1], ("data",)))
    assert close(many.params, one.params, 1e-5)
    assert close([i.loss for i in infos], [i.loss for i in alone], 1e-5)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("via", ["shard_map", "pmap", "jit"])
def test_accumulation_is_the_mean_of_its_parts(via):
    on = Mesh(jax.devices()[:1], ("data",)) if via == "jit" else mesh()
    tx = optax.sgd(0.1)
    one, whole = run("digits", tx, 3, via=via, on=on)
    two, parts = run("digits", tx, 3, via=via, on=on, accumulate=4)
    assert close(one.params, two.params, 1e-6)
    assert close([i.loss for i in whole], [i.loss for i in parts], 1e-6)


@pytest.mark.slow
def test_recomputation_changes_nothing_in_a_step():
    config = jrc.models.mlp.Config((64, 32, 32, 10), "relu")
    plain = functools.partial(jrc.models.mlp.loss, config=config)
    results = []
    tx = jrc.dgc_momentum(0.1, 0.9, 0, sparsity=(0.99,), min_size=1000, axis_name="data")
    for loss in (jrc.recompute_segments(plain, config.boundaries), plain):
        params = jrc.models.mlp.init(jax.random.key(0), config)
        state = jrc.init_state(params, tx, jax.random.key(7), mesh=mesh())
        step = jrc.make_train_step(loss, tx, mesh=mesh())
        for i in range(4):
            state, info = step(state, digits()[2](i))
        results.append((state.params, info.loss))
    assert close(results[0], results[1], 1e-5)


def test_keys_differ_by_step_replica_and_part():
    def loss_fn(params, batch, key):
        # Equal keys would draw equal numbers; all are shown, side by side.
        return jnp.sum(params["w"] * 0), jax.random.key_data(key).astype(jnp.uint32)[0]

    seen = set()
    tx = optax.sgd(0.1)
    params = {"w": jnp.ones(2)}
    for replica in range(2):  # one replica's draw at a time, through a one-replica mesh axis
        state = jrc.init_state(params, tx, jax.random.key(replica), mesh=mesh())
        step = jrc.make_train_step(loss_fn, tx, mesh=mesh(), accumulate=2)
        for _ in range(3):
            state, info = step(state, np.zeros((8, 1), np.float32))
            seen.add(int(info.aux))
    assert len(seen) == 6

    def drawn(params, batch, key):
        number = jax.random.uniform(key)
        return jnp.mean(params["w"]) * number, {"mean": number, "square": number**2}

    state = jrc.init_state(params, tx, jax.random.key(0), mesh=mesh())
    _, info = jrc.make_train_step(drawn, tx, mesh=mesh(), accumulate=2)(state, np.zeros((8, 1)))
    # Eight equal draws would have no variance.
    assert float(info.aux["square"] - info.aux["mean"] ** 2) > 1e-3


def test_keys_are_folded_with_step_then_replica():
    def loss_fn(params, batch, key):
        return jnp.sum(params["w"]) * jax.random.uniform(key)

    tx, params = optax.sgd(1.0), {"w": jnp.zeros(())}
    state = jrc.init_state(params, tx, jax.random.key(3), mesh=mesh())
    step = jrc.make_train_step(loss_fn, tx, mesh=mesh())
    expected = 0.0
    for t in range(2):
        state, _ = step(state, np.zeros((4, 1), np.float32))
        keys = [jax.random.fold_in(jax.random.fold_in(jax.random.key(3), t), r) for r in range(4)]
        expected -= np.mean([jax.random.uniform(key) for key in keys])
        assert np.isclose(float(state.params["w"]), expected, rtol=1e-6)


def test_aux_floats_are_averaged_and_counts_added():
    def loss_fn(params, batch, key):
        right = batch > 3
        return jnp.mean(params["w"] * batch), {
            "mean": jnp.mean(batch), "count": jnp.sum(right), "last": right[-1], "none": None,
        }  # fmt: skip

    tx = optax.sgd(0.0)
    state = jrc.init_state({"w": jnp.ones(())}, tx, jax.random.key(0), mesh=mesh())
    step = jrc.make_train_step(loss_fn, tx, mesh=mesh(), accumulate=2)
    _, info = step(state, np.arange(8.0, dtype=np.float32))
    assert float(info.aux["mean"]) == 3.5 and int(info.aux["count"]) == 4
    assert int(info.aux["last"]) == 4 and info.aux["none"] is None


def stateful_loss(params, model_state, batch, key):
    x, bad = batch
    new = {"mean": 0.5 * model_state["mean"] + 0.5 * jnp.mean(x), "count": model_state["count"] + 1}
    loss = jnp.mean((params["w"][None] * x) ** 2) * jnp.mean(jnp.where(bad > 0, jnp.nan, 1.0))
    new["mean"] = jnp.where(jnp.any(bad > 0), jnp.nan, new["mean"])
    return loss, (new, jnp.max(x))


def stateful(tx, **options):
    model_state = {"mean": jnp.zeros(()), "count": jnp.zeros((), jnp.int32)}
    params = {"w": jnp.ones(8)}
    state = jrc.init_state(params, tx, jax.random.key(0), model_state=model_state, mesh=mesh())
    return state, jrc.make_train_step(stateful_loss, tx, mesh=mesh(), donate=False, **options)


def test_means_of_float16_have_the_range_of_float32():
    """Eight gradients of 30,000 add up to more than float16 has."""
    wide = jnp.full(2, 6e4, jnp.float16)

    def loss(params, model_state, batch, key):
        return jnp.sum(params["w"].astype(jnp.float32) * batch[0]), (model_state, None)

    tx, devices = optax.sgd(1e-4), Mesh(jax.devices(), ("data",))
    params, state = {"w": jnp.ones(4, jnp.float16)}, {"mean": wide}
    options = {"model_state": state, "mesh": devices}
    begun = jrc.init_state(params, tx, jax.random.key(0), **options)
    step = jrc.make_train_step(loss, tx, mesh=devices)
    after, info = step(begun, jnp.full((8, 4), 3e4, jnp.float32))
    np.testing.assert_array_equal(after.params["w"], np.full(4, -2.0, np.float16))
    np.testing.assert_array_equal(after.model_state["mean"], wide)
    assert after.params["w"].dtype == after.model_state["mean"].dtype == jnp.float16
    # Two bytes of each float16 gradient would be sent, and four are.
    assert float(info.bytes_sent) == 2 * 7 / 8 * 4 * 4


@pytest.mark.parametrize("accumulate", [1, 2])
def test_model_state_is_threaded_through_the_parts_and_averaged(accumulate):
    rows = np.arange(8.0 * 8, dtype=np.float32).reshape(8, 8)
    state, step = stateful(optax.sgd(0.0), accumulate=accumulate)
    state, info = step(state, (rows, np.zeros((8, 1), np.float32)))
    mean = 0.0
    for part in rows.reshape(4, accumulate, -1).mean(-1).T:
        mean = 0.5 * mean + 0.5 * part
    assert np.isclose(float(state.model_state["mean"]), np.mean(mean))
    assert int(state.model_state["count"]) == accumulate
    assert np.isclose(float(info.aux), rows.reshape(4 * accumulate, -1).max(-1).mean())


@pytest.mark.parametrize("via", ["shard_map", "pmap"])
def test_a_nan_on_one_replica_enters_nothing(via):
    tx = jrc.dgc_momentum(0.1, 0.9, 0, axis_name="data", min_size=4, sparsity=(0.5,))
    state, step = stateful(tx, via=via)
    x = np.arange(32.0, dtype=np.float32).reshape(4, 8) / 32
    good, bad = np.zeros((4, 1), np.float32), np.zeros((4, 1), np.float32)
    bad[2] = 1
    state, info = step(state, (x, good))
    assert not info.skipped
    after, info = step(state, (x, bad))
    assert bool(info.skipped) and not np.isfinite(float(info.loss))
    assert same_bits((after.params, after.model_state), (state.params, state.model_state))
    old, new = state.opt_state[0], after.opt_state[0]
    assert same_bits((new.u, new.v, new.step), (old.u, old.v, old.step)) and int(new.skipped) == 1
    assert int(after.step) == int(state.step) + 1
    again, info = step(after, (x, good))
    assert not info.skipped and np.isfinite(float(info.loss)) and int(again.opt_state[0].step) == 2


def test_info_reports_what_was_exchanged():
    state, step, batch = start("digits", optax.sgd(0.1))
    size = sum(x.size for x in jax.tree.leaves(state.params))
    _, info = step(state, batch(0))
    assert float(info.bytes_sent) == 2 * 3 / 4 * 4 * size and float(info.density) == 1.0
    _, infos = run("digits", dgc(), 12)
    small = 128 + 128 * 10 - 1280 + 10  # biases; both weight matrices have 1000 entries or more
    k = int(64 * 128 * (1 - 0.99)) + int(1280 * (1 - 0.99))
    assert float(infos[-1].bytes_sent) == 3 * 8 * k + 1.5 * 4 * small
    assert float(infos[0].bytes_sent) == 1.5 * 4 * size and float(infos[0].density) == 1.0
    assert np.isclose(float(infos[-1].density), k / (64 * 128 + 1280))
    assert all(float(each.bytes_received) == float(each.bytes_sent) for each in (info, *infos))


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("via", ["shard_map", "pmap"])
def test_info_reports_what_all_replicas_keep_back(via):
    state, infos = run("digits", dgc(), 5, via=via)
    rows = [np.asarray(v, np.float64) for v in jax.tree.leaves(state.opt_state[0].v)]
    want = np.sqrt(sum(np.sum(row**2) for row in rows))
    assert want > 0 and np.isclose(float(infos[-1].norm_kept), want, rtol=1e-5)
    assert float(infos[0].norm_kept) == 0  # a dense step before the ramp-up
    assert np.isclose(float(jrc.dgc_stats(state).norm_kept), want, rtol=1e-5)
    _, infos = run("digits", optax.sgd(0.1), 1, via=via)
    assert float(infos[0].norm_kept) == 0


def test_grad_norm_is_the_mean_of_the_replicas_norms():
    def loss_fn(params, batch, key):
        return jnp.sum(params["w"] * batch)

    tx = optax.sgd(0.0)
    state = jrc.init_state({"w": jnp.ones(())}, tx, jax.random.key(0), mesh=mesh())
    _, info = jrc.make_train_step(loss_fn, tx, mesh=mesh())(state, np.array([1.0, -2, 3, -4]))
    assert np.isclose(float(info.grad_norm), 2.5)


def test_init_state_lays_out_and_copies():
    params = {"w": jnp.ones((40, 50)), "b": jnp.ones(3)}
    state = jrc.init_state(params, dgc(), jax.random.key(0), mesh=mesh())
    dgc_state = state.opt_state[0]
    assert dgc_state.u["w"].shape == dgc_state.v["w"].shape == (REPLICAS, 40, 50)
    assert dgc_state.u["w"].sharding.spec == P("data")
    assert all(x.sharding.is_fully_replicated for x in (state.params["w"], state.key))
    step = jrc.make_train_step(lambda p, b, k: jnp.sum(p["w"]) * jnp.mean(b), dgc(), mesh=mesh())
    step(state, np.ones((4, 1), np.float32))
    assert state.params["w"].is_deleted()  # donated
    assert float(params["w"].sum()) == 2000  # the user's own, copied


def test_the_shapes_of_a_state_cost_nothing():
    params, tx = {"w": jnp.ones((40, 50))}, dgc()
    make = lambda params: jrc.init_state(params, tx, jax.random.key(0), mesh=mesh())  # noqa: E731
    shapes, state = jax.eval_shape(make, params), make(params)
    for shape, leaf in zip(jax.tree.leaves(shapes), jax.tree.leaves(state), strict=True):
        assert (shape.shape, shape.dtype) == (leaf.shape, leaf.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_any_mesh_and_any_placement_of_the_batch(kind):
    on = jax.make_mesh((REPLICAS,), ("data",), axis_types=(kind,), devices=jax.devices()[:4])
    want, _ = run("digits", dgc(), 3)
    for place in (lambda x: x, lambda x: jax.device_put(x, NamedSharding(on, P("data")))):
        state, step, batch = start("digits", dgc(), on=on)
        for i in range(3):
            state, _ = step(state, jax.tree.map(place, batch(i)))
        assert close(state.params, want.params, 1e-6)


@pytest.mark.slow
def test_scans_over_a_constant_carry_work():
    """What replication checking inside shard_map refuses, users write every day."""

    def loss_fn(params, batch, key):
        carry = jnp.zeros(())
        return jax.lax.scan(lambda c, x: (c + jnp.mean(params["w"] * x), None), carry, batch)[0]

    tx = dgc()
    state = jrc.init_state({"w": jnp.ones(2000)}, tx, jax.random.key(0), mesh=mesh())
    _, info = jrc.make_train_step(loss_fn, tx, mesh=mesh())(state, np.ones(8, np.float32))
    assert float(info.loss) == 2.0


def test_memory_is_that_of_the_compiled_step():
    state, step, batch = start("digits", dgc())
    stats = step.lower(state, batch(0)).compile().memory_analysis()
    memory = step.memory(state, batch(0))
    assert memory.arguments == stats.argument_size_in_bytes
    assert memory.temporaries == stats.temp_size_in_bytes > 0
    assert memory.aliased == stats.alias_size_in_bytes > 0
    assert memory.peak == memory.arguments + memory.outputs + memory.temporaries - memory.aliased
    # Nothing was donated, and shapes will do.
    assert step.memory(jax.eval_shape(lambda x: x, state), batch(0)).outputs == memory.outputs
    step(state, batch(0))
    with pytest.raises(ValueError, match="via must be one that makes a single program"):
        start("digits", dgc(), via="pmap")[1].lower(state, batch(0))


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("via", ["shard_map", "jit"])
def test_steps_in_a_loop_are_steps_one_by_one(via):
    on = Mesh(jax.devices()[:1], ("data",)) if via == "jit" else mesh()
    tx = dgc() if via == "shard_map" else optax.sgd(0.1, 0.9)
    one, infos = run("digits", tx, 4, via=via, on=on)
    state, step, batch = start("digits", tx, via=via, on=on)
    batches = jax.tree.map(lambda *parts: np.stack(parts), *(batch(i) for i in range(4)))
    looped = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches), donate_argnums=0)
    state, found = looped(state, batches)
    assert close(one.params, state.params, 1e-6)
    assert int(state.step) == 4
    assert close([info.loss for info in infos], list(found.loss), 1e-6)


def test_the_norm_of_complex_gradients():
    def loss(params, batch, key):
        return jnp.mean(jnp.abs(batch * params["z"] - 1j) ** 2)

    params, ones = {"z": jnp.ones((), jnp.complex64)}, np.ones(8, np.float32)
    state = jrc.init_state(params, optax.sgd(0.1), jax.random.key(0), mesh=mesh())
    _, info = jrc.make_train_step(loss, optax.sgd(0.1), mesh=mesh())(state, ones)
    grads = jax.grad(loss)(params, ones, None)
    assert float(info.grad_norm) == pytest.approx(float(optax.tree.norm(grads)), rel=1e-6)


@pytest.mark.parametrize(
    "new",
    [dict, collections.OrderedDict, lambda s: {**s, "none": None}, lambda s: {**s, "b": 2.0}],
)
def test_a_model_state_may_come_back_in_another_container(new):
    old = FrozenDict({"a": jnp.zeros(2), "b": jnp.ones(())})
    fn = lambda p, s, b, k: (jnp.mean((b * p["w"]) ** 2), (new(s), None))  # noqa: E731
    tx, params = optax.sgd(0.1), {"w": jnp.ones(())}
    state = jrc.init_state(params, tx, jax.random.key(0), model_state=old, mesh=mesh())
    state, _ = jrc.make_train_step(fn, tx, mesh=mesh())(state, np.ones(8, np.float32))
    assert jax.tree.structure(state.model_state) == jax.tree.structure(old)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["a"], meta_fields=["count"])
@dataclasses.dataclass
class Counted:
    a: Any
    count: int


def test_fields_of_a_model_state_that_are_no_leaves_are_not_lost():
    new = lambda s: Counted(s.a * 2, s.count + 1)  # noqa: E731
    fn = lambda p, s, b, k: (jnp.mean((b * p["w"]) ** 2), (new(s), None))  # noqa: E731
    tx, params, on = optax.sgd(0.1), {"w": jnp.ones(())}, Mesh(jax.devices()[:1], ("data",))
    old = Counted(jnp.ones(()), 0)
    state = jrc.init_state(params, tx, jax.random.key(0), model_state=old, mesh=on)
    state, _ = jrc.make_train_step(fn, tx, mesh=on, via="jit")(state, np.ones(8, np.float32))
    assert state.model_state.count == 1


def test_a_loss_that_is_a_number():
    tx = optax.sgd(0.1)
    state = jrc.init_state({"w": jnp.ones(3)}, tx, jax.random.key(0), mesh=mesh())
    step = jrc.make_train_step(lambda p, b, k: 1.5, tx, mesh=mesh())
    assert float(step(state, np.ones(8))[1].loss) == 1.5


def test_errors():
    manual = jax.make_mesh(
        (4,), ("data",), axis_types=(AxisType.Manual,), devices=jax.devices()[:4]
    )
    with pytest.raises(ValueError, match="mesh must have automatic or explicit axes"):
        jrc.init_state({}, optax.sgd(0.1), jax.random.key(0), mesh=manual)
    make = functools.partial(jrc.make_train_step, lambda p, b, k: jnp.mean(p["w"]), optax.sgd(0.1))
    with pytest.raises(ValueError, match="one of 'shard_map', 'pmap', 'jit', got 'xmap'"):
        make(via="xmap")
    with pytest.raises(ValueError, match="accumulate must be a whole number >= 1, got 0"):
        make(accumulate=0)
    with pytest.raises(ValueError, match="axis of the mesh, got 'batch'. The axes are 'data'"):
        make(mesh=mesh(), axis_name="batch")
    with pytest.raises(ValueError, match="jrc.init_state: axis_name must be an axis of the mesh"):
        jrc.init_state({}, optax.sgd(0.1), jax.random.key(0), mesh=mesh(), axis_name="x")
    state = jrc.init_state({"w": jnp.ones(3)}, optax.sgd(0.1), jax.random.key(0), mesh=mesh())
    with pytest.raises(ValueError) as error:
        make(mesh=mesh(), accumulate=2)(state, {"x": np.ones((12, 2))})
    assert "multiple of replicas * accumulate = 4 * 2 = 8, got shape [12, 2] at 'x'" in str(error)
    with pytest.raises(ValueError, match="got shape \\[\\] at '.the batch itself.'"):
        make(mesh=mesh())(state, np.float32(1))
    bad = jrc.make_train_step(lambda p, b, k: p["w"], optax.sgd(0.1), mesh=mesh())
    with pytest.raises(ValueError, match=r"floating scalar.*got float32\[3\]"):
        bad(state, np.ones((4, 1)))
    tx = dgc(axis_name=None)
    state = jrc.init_state({"w": jnp.ones(2000)}, tx, jax.random.key(0), mesh=mesh())
    step = jrc.make_train_step(lambda p, b, k: jnp.mean(p["w"]), tx, mesh=mesh())
    with pytest.raises(
        ValueError, match="axis_name=None, which is one replica. Pass axis_name='da"
    ):
        step(state, np.ones((4, 1)))


def drift(tree):
    """Largest difference between the devices' copies of what counts as replicated."""
    worst = 0.0
    for x in jax.tree.leaves(tree):
        if not jnp.issubdtype(x.dtype, jnp.number) or not x.sharding.is_fully_replicated:
            continue
        copies = [np.asarray(shard.data, np.float64) for shard in x.addressable_shards]
        worst = max([worst, *(np.abs(copy - copies[0]).max(initial=0) for copy in copies)])
    return worst


NET = {"w": np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6), "b": np.ones(6, np.float32)}


def net_loss(params, batch, key):
    h = batch @ params["w"] + params["b"][None]
    return jnp.mean(jnp.tanh(h) ** 2)


def net_batch(t):
    return np.random.default_rng(t).normal(size=(8, 4)).astype(np.float32)


compress = functools.partial(
    jrc.scale_by_dgc, momentum=0.9, sparsity=(0.5,), min_size=2, axis_name="data"
)  # fmt: skip
WRAPPED = {
    "multi_transform": optax.multi_transform(
        {"dgc": optax.chain(compress(), optax.scale(-0.1)), "sgd": optax.sgd(0.1)},
        {"w": "dgc", "b": "sgd"},
    ),
    "masked": optax.chain(optax.masked(compress(), {"w": True, "b": False}), optax.scale(-0.1)),
    "two groups": optax.multi_transform(
        {"one": compress(), "two": compress(momentum=0.5)}, {"w": "one", "b": "two"}
    ),
    "adam behind": optax.chain(compress(momentum=0.0), optax.scale_by_adam(), optax.scale(-0.01)),
    "multi steps": optax.MultiSteps(optax.chain(compress(), optax.scale(-0.1)), 2),
    "apply_if_finite": optax.apply_if_finite(optax.chain(compress(), optax.scale(-0.1)), 5),
}


@pytest.mark.exhaustive(after=6)
@pytest.mark.slow(after=2)
@pytest.mark.parametrize("via", ["shard_map", "pmap"])
@pytest.mark.parametrize("name", WRAPPED)
def test_replicas_never_drift_apart(name, via):
    tx = WRAPPED[name]
    tx = tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx
    state = jrc.init_state(NET, tx, jax.random.key(0), mesh=mesh())
    step = jrc.make_train_step(net_loss, tx, mesh=mesh(), via=via)
    for t in range(6):
        bad = name != "multi steps" and t == 3
        batch = net_batch(t)
        batch[0] = np.nan if bad else batch[0]
        state, info = step(state, batch)
        assert bool(info.skipped) == bad
    assert drift((state.params, state.opt_state)) == 0.0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))
    moved = jax.tree.map(lambda new, old: not np.array_equal(new, old), state.params, NET)
    assert all(jax.tree.leaves(moved))


def test_a_skipped_step_is_skipped_by_the_whole_chain():
    tx = optax.chain(
        compress(), optax.scale_by_adam(), optax.add_decayed_weights(0.1), optax.scale(-0.1)
    )
    state = jrc.init_state(NET, tx, jax.random.key(0), mesh=mesh())
    step = jrc.make_train_step(net_loss, tx, mesh=mesh(), donate=False)
    state, _ = step(state, net_batch(0))
    bad = net_batch(1)
    bad[5] = np.inf
    after, info = step(state, bad)
    assert bool(info.skipped) and same_bits(after.params, state.params)
    assert same_bits(after.opt_state[1:], state.opt_state[1:])
    assert int(after.opt_state[0].skipped) == 1


def test_many_small_parts_are_not_lost_in_half_precision():
    def loss_fn(params, batch, key):
        return jnp.sum(params["w"].astype(jnp.float32) * jnp.mean(batch))

    tx = optax.sgd(1.0)
    state = jrc.init_state({"w": jnp.zeros(1, jnp.bfloat16)}, tx, jax.random.key(0), mesh=mesh())
    step = jrc.make_train_step(loss_fn, tx, mesh=mesh(), accumulate=512)
    state, _ = step(state, np.ones(4 * 512, np.float32))
    assert float(state.params["w"][0]) == -1.0


def test_integer_model_state_is_one_value():
    def loss_fn(params, model_state, batch, key):
        seen = model_state["seen"] + jnp.sum(batch > 3, dtype=jnp.int32)
        return jnp.mean(params["w"] * batch), ({"seen": seen}, None)

    tx, model_state = optax.sgd(0.1), {"seen": jnp.int32(0)}
    state = jrc.init_state(
        {"w": jnp.ones(())}, tx, jax.random.key(0), model_state=model_state, mesh=mesh()
    )
    step = jrc.make_train_step(loss_fn, tx, mesh=mesh())
    state, _ = step(state, np.arange(8.0)[::-1].astype(np.float32))
    assert drift(state.model_state) == 0 and int(state.model_state["seen"]) == 2


def test_parameters_from_anywhere_and_one_compilation(caplog):
    for params in (
        jax.device_put(NET, jax.devices()[5]),
        jax.device_put(NET, NamedSharding(Mesh(jax.devices()[:2], ("x",)), P())),
        {"w": 2.0, "b": np.float32(1)},
    ):
        state = jrc.init_state(params, optax.sgd(0.1), jax.random.PRNGKey(0), mesh=mesh())
        step = jrc.make_train_step(
            lambda p, b, k: jnp.mean(p["w"] ** 2) + jnp.sum(p["b"] ** 2),
            optax.sgd(0.1),
            mesh=mesh(),
        )
        with jax.log_compiles():
            for _ in range(2):
                state, _ = step(state, np.ones(4, np.float32))
        compiled = [r for r in caplog.records if "Finished XLA compilation" in r.getMessage()]
        assert sum("train_step" in r.getMessage() for r in compiled) == 1
        caplog.clear()


def test_hyperparameters_are_injected_before_the_compression():
    clips = optax.clip(0.01), optax.inject_hyperparams(optax.clip)(max_delta=0.01)
    ends = []
    for clip in clips:
        tx = optax.chain(clip, compress())
        state = jrc.init_state(NET, tx, jax.random.key(0), mesh=mesh())
        step = jrc.make_train_step(net_loss, tx, mesh=mesh())
        for i in range(3):
            state, _ = step(state, net_batch(i))
        ends.append(state.params)
    jax.tree.map(np.testing.assert_array_equal, *ends)
    assert not np.array_equal(ends[0]["w"], NET["w"])


def test_errors_about_states_meshes_and_results():
    two = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    tx = compress(axis_name="model")
    with pytest.raises(ValueError, match="must have the axis_name='data' of the step, got one"):
        state = jrc.init_state(NET, tx, jax.random.key(0), mesh=two)
        jrc.make_train_step(net_loss, tx, mesh=two)(state, net_batch(0))
    with pytest.raises(ValueError, match="must have one axis with via='pmap'"):
        jrc.make_train_step(net_loss, tx, mesh=two, via="pmap")
    with pytest.raises(TypeError, match="mesh must be a jax.sharding.Mesh or None, got list"):
        jrc.init_state(NET, tx, jax.random.key(0), mesh=jax.devices())
    with pytest.raises(
        ValueError,
        match="must be the name of one axis or a pair .inner, outer. of two, got None",
    ):
        jrc.make_train_step(net_loss, tx, axis_name=None)
    with pytest.raises(ValueError, match="before the compression must have no state of its own"):
        tx = optax.chain(optax.trace(0.9), compress())
        jrc.init_state(NET, tx, jax.random.key(0), mesh=mesh())
    with pytest.raises(ValueError, match="got InjectStatefulHyperparamsState. Chain it behind"):
        tx = optax.chain(optax.inject_hyperparams(optax.trace)(decay=0.9), compress())
        jrc.init_state(NET, tx, jax.random.key(0), mesh=mesh())

    state = jrc.init_state(NET, optax.sgd(0.1), jax.random.key(0), mesh=mesh())
    with pytest.raises(ValueError, match="state must be built for the optimizer tx"):
        jrc.make_train_step(net_loss, compress(), mesh=mesh())(state, net_batch(0))
    small = jrc.init_state(
        NET, compress(), jax.random.key(0), mesh=Mesh(jax.devices()[:2], ("data",))
    )
    with pytest.raises(
        ValueError, match="for the 4 replicas of the step, got one with compression"
    ):
        jrc.make_train_step(net_loss, compress(), mesh=mesh())(small, net_batch(0))
    step = jrc.make_train_step(net_loss, optax.sgd(0.1), mesh=mesh(), donate=False)
    step(state, net_batch(0))
    with pytest.raises(ValueError, match=r"got shape \[6, 4\] at"):
        step(state, net_batch(0)[:6])

    def returning(out, model_state=None):
        state = jrc.init_state(
            NET, optax.sgd(0.1), jax.random.key(0), mesh=mesh(), model_state=model_state
        )
        jrc.make_train_step(lambda *args: out, optax.sgd(0.1), mesh=mesh())(state, net_batch(0))

    one = jnp.ones(())
    cases = [
        ((None,), "got None from"),
        (([one, None],), "got a list of 2 from"),
        (((one, 1, 2),), "got a tuple of 3 from"),
        (((one, {"a": "text"}),), "got str at 'a'"),
        (((one, jax.random.key(0)),), "Take it out of aux"),
        ((one, {"m": one}), r"must return \(loss, \(model_state, aux\)\)"),
        (
            ((one, ({"m": one.astype(jnp.bfloat16)}, None)), {"m": one}),
            "got bfloat16.. for leaf 'm', float32",
        ),
    ]
    for arguments, text in cases:
        with pytest.raises(ValueError, match=text):
            returning(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_under_a_mesh_that_is_set_and_inside_jit(kind):
    on = jax.make_mesh((REPLICAS,), ("data",), axis_types=(kind,), devices=jax.devices()[:4])
    want, _ = run("digits", dgc(), 2)
    with jax.set_mesh(on):
        got, _ = run("digits", dgc(), 2, on=on)
    assert close(got.params, want.params, 1e-6)
    state, step, batch = start("digits", dgc(), donate=False)
    inside = jax.jit(lambda state, batch: step(state, batch))
    for i in range(2):
        state, _ = inside(state, batch(i))
    assert close(state.params, want.params, 1e-6)


@pytest.mark.slow
def test_pairs_of_axes_average_inside_and_compress_between():
    pair, hosts = ("chip", "data"), 2
    two = Mesh(np.array(jax.devices()[:4]).reshape(hosts, 2), ("data", "chip"))
    tx = jrc.dgc_momentum(0.1, 0.9, 0, sparsity=(0.5,), min_size=2, axis_name=pair)
    state = jrc.init_state(NET, tx, jax.random.key(0), mesh=two, axis_name=pair)
    assert state.opt_state[0].v["w"].shape == (hosts, 4, 6)
    step = jrc.make_train_step(net_loss, tx, mesh=two, axis_name=pair)
    flat = jrc.dgc_momentum(0.1, 0.9, 0, sparsity=(0.5,), min_size=2, axis_name="data")
    one = Mesh(np.array(jax.devices()[:hosts]), ("data",))
    expected = jrc.init_state(NET, flat, jax.random.key(0), mesh=one)
    # The mean over a host is the gradient of the host's whole part of the batch.
    plain = jrc.make_train_step(net_loss, flat, mesh=one)
    for t in range(4):
        state, info = step(state, net_batch(t))
        expected, other = plain(expected, net_batch(t))
        inner = 4 * sum(x.size for x in NET.values())
        assert float(info.bytes_sent) - inner == float(other.bytes_sent) > 0
    assert close(state.params, expected.params, 1e-5)
    assert np.isclose(float(info.norm_kept), float(other.norm_kept), rtol=1e-4)
    batch = net_batch(9)
    batch[5, 0] = np.nan
    params = jax.tree.map(np.asarray, state.params)
    state, info = step(state, batch)
    assert bool(info.skipped) and same_bits(state.params, params)

    dense = jrc.make_train_step(net_loss, optax.sgd(0.1), mesh=two, axis_name=pair)
    start = jrc.init_state(NET, optax.sgd(0.1), jax.random.key(0), mesh=two, axis_name=pair)
    assert drift(dense(start, net_batch(0))[0].params) == 0.0
    with pytest.raises(ValueError, match="mesh must be given with a pair of axes"):
        jrc.make_train_step(net_loss, tx, axis_name=pair)
    with pytest.raises(ValueError, match="must be an axis of the mesh, got 'chip'"):
        jrc.make_train_step(net_loss, tx, mesh=one, axis_name=pair)
    with pytest.raises(ValueError, match="must have one axis with via='pmap'"):
        jrc.make_train_step(net_loss, tx, mesh=two, axis_name=pair, via="pmap")


@pytest.mark.parametrize(
    ("tx", "axes"),
    [
        (compress(axis_name="data"), ("chip", "data")),
        (compress(axis_name=("data", "chip")), ("chip", "data")),
        (
            optax.multi_transform(
                {"w": compress(), "b": compress(axis_name=None)}, {"w": "w", "b": "b"}
            ),
            "data",
        ),
    ],
)
def test_every_compression_exchanges_over_the_axes_of_the_step(tx, axes):
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    on = Mesh(devices, ("data", "chip")) if isinstance(axes, tuple) else mesh()
    state = jrc.init_state(NET, tx, jax.random.key(0), mesh=on, axis_name=axes)
    step = jrc.make_train_step(net_loss, tx, mesh=on, axis_name=axes)
    with pytest.raises(ValueError, match="replicas would differ. Pass axis_name="):
        step(state, net_batch(0))


def test_a_skipped_step_is_skipped_behind_what_takes_nan_out():
    tx = optax.chain(optax.zero_nans(), compress(), optax.scale(-0.1))
    state = jrc.init_state(NET, tx, jax.random.key(0), mesh=mesh())
    step = jrc.make_train_step(net_loss, tx, mesh=mesh(), donate=False)
    state, _ = step(state, net_batch(0))
    bad = net_batch(1)
    bad[3] = np.nan
    after, info = step(state, bad)
    assert bool(info.skipped) and same_bits(after.params, state.params)
    old, new = state.opt_state[1], after.opt_state[1]
    assert same_bits((new.u, new.v, new.step), (old.u, old.v, old.step)) and int(new.skipped) == 1


@pytest.mark.slow(every=True)
@pytest.mark.exhaustive(after=2)
@pytest.mark.parametrize("axes", ["data", ("chip", "data")])
def test_gradients_that_multi_steps_gathers_are_saved_whole(axes, tmp_path):
    on = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "chip"))
    on = mesh() if axes == "data" else on
    params = NET | {"scale": np.float32(1.5)}
    tx = optax.MultiSteps(jrc.dgc_momentum(0.1, 0.9, 0, (1), (0.5,), min_size=2, axis_name=axes), 2)

    def loss(params, batch, key):
        return params["scale"] * net_loss(params, batch, key)

    state = jrc.init_state(params, tx, jax.random.key(0), mesh=on, axis_name=axes)
    step = jrc.make_train_step(loss, tx, mesh=on, axis_name=axes, donate=False)
    state, _ = step(state, net_batch(0))
    jrc.save(tmp_path, state)
    resumed = jrc.restore(tmp_path, state)
    for t in range(1, 4):
        (state, _), (resumed, _) = step(state, net_batch(t)), step(resumed, net_batch(t))
    assert same_bits(state, resumed) and drift(state.params) == drift(resumed.params) == 0.0


def test_keys_in_the_model_state_are_one_replica_s():
    def loss(params, model_state, batch, key):
        return net_loss(params, batch, key), ({"key": key}, None)

    tx = optax.sgd(0.1)
    state = jrc.init_state(
        NET, tx, jax.random.key(0), model_state={"key": jax.random.key(1)}, mesh=mesh()
    )
    state, _ = jrc.make_train_step(loss, tx, mesh=mesh())(state, net_batch(0))
    assert drift(jax.random.key_data(state.model_state["key"])) == 0.0


def test_integers_among_the_parameters():
    params = NET | {"n": np.arange(3, dtype=np.int32)}
    state = jrc.init_state(params, optax.sgd(0.1), jax.random.key(0), mesh=mesh())
    with pytest.raises(ValueError, match="got int32.3. at 'n'. Keep it in the model state"):
        jrc.make_train_step(net_loss, optax.sgd(0.1), mesh=mesh())(state, net_batch(0))


def test_eight_bit_gradients_of_parts_are_summed():
    def loss_fn(params, batch, key):
        return jnp.mean(batch @ params.astype(jnp.float32))

    params, tx = jnp.zeros(4, "float8_e4m3fn"), jrc.dgc_momentum(0.5, 0.9, 0, axis_name="data")
    state = jrc.init_state(params, tx, jax.random.key(0), mesh=mesh())
    step = jrc.make_train_step(loss_fn, tx, mesh=mesh(), accumulate=2)
    state, _ = step(state, np.asarray([[1.0] * 4, [3.0] * 4] * len(jax.devices()), np.float32))
    assert state.params.dtype == params.dtype
    assert state.params.astype(jnp.float32).tolist() == [-1.0] * 4


def test_a_state_of_another_optimizer_is_refused_at_every_call():
    adam, sgd = optax.adam(0.1), optax.sgd(0.1)
    state = jrc.init_state(NET, sgd, jax.random.key(0), mesh=mesh())
    step = jrc.make_train_step(net_loss, sgd, mesh=mesh())
    state, _ = step(state, net_batch(0))
    with pytest.raises(ValueError, match="built for the optimizer tx, got one with another opt_st"):
        step(jrc.init_state(NET, adam, jax.random.key(0), mesh=mesh()), net_batch(1))
    with pytest.raises(ValueError, match="built for the optimizer tx"):
        step(state._replace(opt_state=None), net_batch(1))
    assert int(step(state, net_batch(1))[0].step) == 2


@pytest.mark.slow(after=1, every=True)
@pytest.mark.exhaustive(after=3)
@pytest.mark.parametrize("via", ["shard_map", "pmap"])
@pytest.mark.parametrize("donate", [True, False])
def test_a_donated_state_is_deleted(via, donate):
    """With pmap too, but for the rows, which are copied."""
    for tx in (optax.adam(0.1), compress()):
        state = jrc.init_state(NET, tx, jax.random.key(0), mesh=mesh())
        step = jrc.make_train_step(net_loss, tx, mesh=mesh(), via=via, donate=donate)
        new, _ = step(state, net_batch(0))
        assert all(x.is_deleted() == donate for x in jax.tree.leaves((state.step, state.params)))
        assert not any(x.is_deleted() for x in jax.tree.leaves(new))
        if donate:
            with pytest.raises(ValueError, match="state must not be donated, got one whose arrays"):
                step(state, net_batch(0))
        step(new, net_batch(1))


def with_mu(state, mu):
    return state._replace(opt_state=(state.opt_state[0]._replace(mu=mu), *state.opt_state[1:]))


OTHER_ARRAYS = {
    "moments of another shape": (
        lambda state: with_mu(state, {"b": jnp.zeros(6), "w": jnp.zeros(3)}),
        r"built for the optimizer tx, .*: '0/mu/w' is float32\[3\] and not of shape \[4, 6\]\. B",
    ),
    "integers as parameters": (
        lambda state: state._replace(params={**state.params, "w": jnp.ones((4, 6), int)}),
        "every leaf of params must be floating",
    ),
    "a key that is none": (lambda state: state._replace(key=jnp.zeros(3)), "key must be one"),
}


@pytest.mark.slow(after=1, every=True)
@pytest.mark.parametrize("via", ["shard_map", "pmap"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_state_with_other_arrays_is_refused_at_every_call(via, is_first):
    tx = optax.adam(0.1)
    state = jrc.init_state(NET, tx, jax.random.key(0), mesh=mesh())
    step = jrc.make_train_step(net_loss, tx, mesh=mesh(), via=via, donate=False)
    if not is_first:
        step(state, net_batch(0))
    for change, words in OTHER_ARRAYS.values():
        with pytest.raises((TypeError, ValueError), match=words):
            step(change(state), net_batch(1))


@pytest.mark.slow(after=1, every=True)
@pytest.mark.parametrize("via", ["shard_map", "pmap"])
def test_rows_of_other_replicas_are_refused_at_every_call(via):
    tx = compress()
    state = jrc.init_state(NET, tx, jax.random.key(0), mesh=mesh())
    step = jrc.make_train_step(net_loss, tx, mesh=mesh(), via=via, donate=False)
    step(state, net_batch(0))
    for rows in (2, 8):
        with pytest.raises(ValueError, match=f"built for the 4 replicas .* compression for {rows}"):
            step(jrc.reshard_dgc(state, rows), net_batch(1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """Parameters with values that are no arrays among its leaves, as equinox modules have them."""

    w: Any
    act: Any
    kind: Any
    rate: Any
    power: Any
    inference: Any


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    "options", [{}, {"via": "pmap"}, {"memory_budget": 1.0}, {"outer": jrc.DiLoCo(sync_every=2)}]
)
def test_values_that_are_no_arrays_among_the_parameters(options, tmp_path):
    """As `jrc.plan` takes them: an equinox module has its activation there, and `inference`."""

    def loss(params, batch, key):
        assert params.kind == "mean" and not params.inference and isinstance(params.rate, float)
        return jnp.mean(params.act(batch @ params.w * params.rate) ** params.power)

    layer = Layer(NET["w"], jax.nn.relu, "mean", 0.5, 2, False)
    plain = lambda w, *rest: loss(dataclasses.replace(layer, w=w), *rest)  # noqa: E731
    found = []
    outer = {"outer": options["outer"]} if "outer" in options else {}
    for given, fn in ((layer, loss), (layer.w, plain)):
        state = jrc.init_state(given, optax.adam(0.1), jax.random.key(0), mesh=mesh(), **outer)
        step = jrc.make_train_step(fn, optax.adam(0.1), mesh=mesh(), **options)
        for t in range(2):
            state, _ = step(state, net_batch(t))
        found.append(state)
    assert same_bits(found[0].params.w, found[1].params)
    jrc.save(tmp_path / "state", found[0])
    again = jrc.restore(tmp_path / "state", found[0])
    assert same_bits(again, found[0]) and again.params.act(-1.0) == 0.0
    assert [found[0].params.kind.value, found[0].params.rate.value] == ["mean", 0.5]


def test_numbers_of_python_alone_are_no_parameters():
    with pytest.raises(ValueError, match="params must have an array.* Write jnp.asarray"):
        jrc.init_state({"w": 1.0, "n": 2}, optax.sgd(0.1), jax.random.key(0))
    state = jrc.init_state({"w": np.float64(1.0)}, optax.sgd(0.1), jax.random.key(0))
    assert state.params["w"].shape == ()


@pytest.mark.slow(after=1, every=True)
@pytest.mark.exhaustive(after=5)
@pytest.mark.parametrize("tx", ["dgc", "sgd", "outer"])
@pytest.mark.parametrize("via, accumulate", [("shard_map", 1), ("pmap", 1), ("shard_map", 2)])
def test_python_calls_the_loss_once_for_each_program(tx, via, accumulate):
    calls = []

    def loss_fn(params, batch, key):
        calls.append(key)
        return net_loss(params, batch, key), {"examples": len(batch)}

    outer = jrc.DiLoCo(sync_every=2) if tx == "outer" else None
    tx = dgc() if tx == "dgc" else optax.sgd(0.1)
    state = jrc.init_state(NET, tx, jax.random.key(0), mesh=mesh(), outer=outer)
    step = jrc.make_train_step(
        loss_fn, tx, mesh=mesh(), outer=outer, via=via, accumulate=accumulate
    )
    for i in range(4):
        state, _ = step(state, net_batch(i))
    # With an outer optimizer there are two programs: the inner step, and the one of the exchange.
    assert len(calls) == (2 if outer else 1)
