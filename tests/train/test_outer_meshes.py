"""Outer optimizers with replicas that are split over several devices."""

import collections
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
from jrc.remat._compiled.collectives import collectives as collectives_of
from jrc.remat._compiled.hlo import parse_hlo
from tests.train.tasks import same_bits
from tests.train.test_meshes import AUTO, EXPLICIT, loss_fn, mesh_of, placed, slow, some_params

rare = functools.partial(pytest.param, marks=pytest.mark.exhaustive)
SPECS = {"a": P("fsdp", "model"), "b": P(), "c": P("model", "fsdp")}
SPARSE = jrc.SparseLoCo(2, density=1 / 8, chunk=64)
ROWS = P(("replica", "fsdp"))


def adamw():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def batch(i, rows=16):
    draw = np.random.default_rng(i)
    return tuple(draw.normal(size=(rows, n)).astype(np.float32) for n in (16, 8))


def start(mesh, outer=SPARSE, specs=SPECS, tx=None, loss=loss_fn, axis="replica", **options):
    params, tx = placed(some_params(), mesh, specs), tx or adamw()
    on = {"mesh": mesh, "axis_name": axis, "outer": outer}
    state = jrc.init_state(params, tx, jax.random.key(0), **on)
    return state, jrc.make_train_step(loss, tx, donate=False, **on, **options)


def run(state, step, mesh, steps, begin=0):
    infos = []
    for i in range(begin, begin + steps):
        state, info = step(state, placed(batch(i), mesh, (rows_of(mesh),) * 2))
        infos.append(jax.device_get(info))
    return state, infos


def rows_of(mesh):
    return P(("replica", "fsdp")) if "fsdp" in mesh.axis_names else P("replica")


def on_two():
    """Two replicas of one device each."""
    return Mesh(jax.devices()[:2], ("replica",))


def near(got, want, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def whole(specs):
    return jax.tree.map(lambda _: P(), specs)


@functools.cache
def ran(kind, outer=SPARSE):
    """Two rounds on (2, 2, 2) devices."""
    mesh = mesh_of(2, 2, 2, kind=kind)
    begun, step = start(mesh, outer)
    state, infos = run(begun, step, mesh, 4)
    return mesh, step, begun, state, infos


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AUTO, slow(EXPLICIT)])
def test_what_a_replica_has_lies_as_its_parameters_do(kind):
    mesh, _, begun, state, infos = ran(kind)
    for each in (begun, state):
        local = each.opt_state.local
        mu = local.opt_state[1][0].mu
        for name, spec in SPECS.items():
            assert each.params[name].sharding == NamedSharding(mesh, spec)
            for rows in (local.params, local.outer, mu):
                assert rows[name].sharding == NamedSharding(mesh, P("replica", *spec))
        assert local.params["a"].addressable_shards[0].data.shape == (1, 8, 16)
    assert [bool(info.synchronised) for info in infos] == [False, True] * 2
    # What two devices both have counts once.
    kept = jax.tree.leaves(state.opt_state.local.outer)
    norm = np.sqrt(sum(float(jnp.sum(x * x)) for x in kept))
    np.testing.assert_allclose(infos[-1].norm_kept, norm, rtol=1e-5)


def crossing(step, state, mesh, **which):
    """The collectives of a program: kind, types and axes."""
    text = step.lower(state, batch(0), **which).compile().as_text()
    found = collectives_of(parse_hlo(text), dict(mesh.shape))
    return [(x.kind, x.arrays, x.axes, x.sent) for x in found for _ in range(x.count)]


def arrays_of(found):
    """The arrays that collectives return, however XLA has joined them."""
    # XLA also splits what it computes of a whole leaf, with or without the axis of rows.
    names = [(kind, name) for kind, names, _, _ in found for name in names]
    return collections.Counter((kind, name.replace("[1,1,", "[1,")) for kind, name in names)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AUTO, rare(EXPLICIT)])
def test_a_device_sends_the_message_of_its_shards_and_nothing_is_gathered(kind):
    mesh, step, begun, _, infos = ran(kind)
    inner = crossing(step, begun, mesh, closing=False)
    assert inner and not any("replica" in axes for _, _, axes, _ in inner)
    closing = crossing(step, begun, mesh, closing=True)
    shards = {"a": np.zeros((8, 16)), "b": np.zeros((1, 32)), "c": np.zeros((16, 4))}
    words = 5 + SPARSE.message_words(shards)
    between = [each for each in closing if "replica" in each[2]]
    assert between == [("all-gather", (f"u32[2,{words}]",), ("replica",), 4 * words)]
    assert float(infos[1].bytes_sent) == 4 * words
    # Besides, the devices of a replica ask each other whether all is finite, and add up what is
    # kept: nothing with an entry of a leaf.
    more = arrays_of(closing) - arrays_of(inner) - arrays_of(between)
    assert {name for _, name in more} <= {"s32[]", "f32[]"}


@pytest.mark.parametrize("shape", [(64, 64), (128, 256)])
def test_a_split_replica_sends_as_many_bytes_as_it_has_devices_fewer(shape):
    """From the sizes alone: levels of a leaf and the header are sent by each device."""
    quarter = np.zeros((shape[0] // 2, shape[1] // 2))
    for outer in (jrc.DiLoCo(2), jrc.DiLoCo(2, wire="4bit"), jrc.SparseLoCo(2, density=1 / 8)):
        levels = 4 if isinstance(outer, jrc.SparseLoCo) else 0
        words = outer.message_words({"w": np.zeros(shape)})
        assert 4 * outer.message_words({"w": quarter}) <= words + 3 * levels + 3


DENSE = jrc.DiLoCo(2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "outer"),
    [
        (AUTO, DENSE),
        rare(EXPLICIT, DENSE),
        rare(AUTO, jrc.DiLoCo(4, fragments=2, overlap=1)),
        rare(EXPLICIT, jrc.DiLoCo(4, fragments=2, overlap=1)),
    ],
)
def test_a_dense_run_is_that_of_replicas_of_one_device(kind, outer):
    specs = SPECS | {"a": P(None, ("model", "fsdp"))}
    mesh, two = mesh_of(2, 2, 2, kind=kind), on_two()
    steps = 2 * int(outer.sync_every)
    state, infos = run(*start(mesh, outer, specs), mesh, steps)
    want, alone = run(*start(two, outer, whole(specs)), two, steps)
    near(state.params, want.params)
    near(state.opt_state.local.params, want.opt_state.local.params)
    np.testing.assert_allclose(infos[-1].loss, alone[-1].loss, rtol=1e-5)
    np.testing.assert_allclose(infos[-1].grad_norm, alone[-1].grad_norm, rtol=1e-5)


@pytest.mark.exhaustive
def test_sparse_chunks_that_no_shard_cuts_are_those_of_a_whole_replica():
    specs = {"a": P("fsdp", "model")}
    outer = jrc.SparseLoCo(2, density=1 / 8, chunk=256, wire="f32")

    def loss(params, batch, key):
        target = jnp.sin(jnp.arange(32.0))[:, None] * jnp.cos(jnp.arange(32.0))[None]
        scale = 1 + batch[0].mean()
        return jnp.mean((params["a"] - scale * target) ** 2)

    def go(mesh, spec):
        params = placed({"a": np.zeros((32, 32), np.float32)}, mesh, spec)
        on = {"mesh": mesh, "axis_name": "replica", "outer": outer}
        state = jrc.init_state(params, optax.sgd(1.0), jax.random.key(0), **on)
        step = jrc.make_train_step(loss, optax.sgd(1.0), donate=False, **on)
        return run(state, step, mesh, 4)

    (state, infos), (want, alone) = go(mesh_of(2, 2, 2), specs), go(on_two(), whole(specs))
    near(state.params, want.params)
    near(state.opt_state.local.outer, want.opt_state.local.outer)
    np.testing.assert_allclose(infos[-1].norm_kept, alone[-1].norm_kept, rtol=1e-5)
    assert infos[-1].density == alone[-1].density == 1 / 8


@pytest.mark.slow
def test_every_step_with_everything_sent_is_dense_sgd():
    mesh, tx = mesh_of(2, 2, 2), optax.sgd(0.1)
    outer = jrc.SparseLoCo(1, density=1, error_decay=1.0, wire="f32")
    state, infos = run(*start(mesh, outer, tx=tx), mesh, 3)
    two = on_two()
    dense = jrc.init_state(some_params(), tx, jax.random.key(0), mesh=two, axis_name="replica")
    step = jrc.make_train_step(loss_fn, tx, mesh=two, axis_name="replica")
    dense, want = run(dense, step, two, 3)
    near(state.params, dense.params, 1e-6)
    np.testing.assert_allclose([x.loss for x in infos], [x.loss for x in want], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_a_bad_shard_leaves_its_replica_out_on_all_devices(kind):
    mesh, step, _, begun, _ = ran(kind)
    state = begun
    for i in (4, 5):
        x, y = batch(i)
        if i == 4:
            x[-1] = np.nan  # an example of the second replica, on two of its four devices
        state, info = step(state, placed((x, y), mesh, (ROWS, ROWS)))
    assert int(info.left_out) == 1 and not bool(info.skipped)
    local, old = state.opt_state.local, begun.opt_state.local
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state.params, local)))
    row = lambda tree, at: jax.tree.map(lambda x: np.asarray(x)[at], tree)  # noqa: E731
    assert same_bits(row(old.outer, 1), row(local.outer, 1))
    assert not same_bits(row(old.outer, 0), row(local.outer, 0))
    for at in (0, 1):
        assert same_bits(row(local.params, at), state.params)
    copies_are_equal(state)


def copies_are_equal(tree):
    """Whether devices with the same part of an array have the same bits."""
    for x in jax.tree.leaves(tree):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            continue
        parts = {}
        for shard in x.addressable_shards:
            data = np.asarray(shard.data).tobytes()
            assert parts.setdefault(str(shard.index), data) == data


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "outer",
    [
        jrc.DiLoCo(2, wire="4bit"),
        jrc.SparseLoCo(4, fragments=2, overlap=1, density=1 / 8, chunk=64, levels="chunk"),
    ],
)
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_devices_with_the_same_shard_keep_the_same_bits(kind, outer):
    mesh, _, _, state, infos = ran(kind, outer)
    copies_are_equal(state)
    assert np.isfinite(infos[-1].loss) and infos[-1].bytes_sent == 0 or infos[-1].synchronised


@pytest.mark.slow
def test_a_saved_run_goes_on_bit_for_bit(tmp_path):
    mesh, step, begun, state, _ = ran(AUTO)
    first, _ = run(begun, step, mesh, 3)
    jrc.save(tmp_path / "state", first)
    again = jrc.restore(tmp_path / "state", begun)
    assert jax.tree.map(lambda x: x.sharding, again) == jax.tree.map(lambda x: x.sharding, first)
    again, _ = run(again, step, mesh, 1, begin=3)
    assert same_bits(again, state)


def hosts(count, each, kind=AUTO):
    devices = jax.devices()[: count * each]
    types = (kind,) * 2
    return jax.make_mesh((count, each), ("replica", "fsdp"), axis_types=types, devices=devices)


ON_HOSTS = {"a": P("fsdp"), "b": P(), "c": P(None, "fsdp")}


@functools.cache
def on_hosts(outer, steps):
    mesh = hosts(2, 4)
    return run(*start(mesh, outer, ON_HOSTS), mesh, steps)[0]


def layout(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, str(x.sharding.spec)), tree)


@pytest.mark.parametrize(
    ("count", "each", "outer", "kind"),
    [
        rare(4, 2, SPARSE, AUTO),
        rare(4, 2, SPARSE, EXPLICIT),
        rare(3, 2, SPARSE, AUTO),
        rare(4, 2, jrc.SparseLoCo(4, fragments=2, density=1 / 8, chunk=64), EXPLICIT),
        rare(4, 2, jrc.DiLoCo(4, fragments=2, overlap=1), EXPLICIT),
        rare(3, 2, jrc.DiLoCo(4, fragments=2, overlap=1), AUTO),
    ],
)
def test_other_hosts_go_on_with_means_that_stay(count, each, outer, kind):
    steps = 2 if outer.fragments == 1 else 3
    old, mesh = on_hosts(outer, steps), hosts(count, each, kind)
    fresh, step = start(mesh, outer, ON_HOSTS)
    given = {"outer": outer} if outer.overlap else {}
    state = jrc.reshard(old, count, mesh=mesh, axis_name="replica", **given)
    assert layout(state) == layout(fresh)
    assert same_bits(state.params, old.params)
    assert same_bits(state.opt_state.shared, old.opt_state.shared)
    before, after = old.opt_state.local, state.opt_state.local
    kept = lambda own: (own.outer, own.params, own.opt_state)  # noqa: E731
    for x, y in zip(jax.tree.leaves(kept(before)), jax.tree.leaves(kept(after)), strict=True):
        near(np.asarray(y).mean(0), np.asarray(x).mean(0), 1e-6)
    if count == 4:  # each row twice
        assert same_bits(jax.tree.map(lambda x: np.repeat(x, 2, 0), before.outer), after.outer)
    rows = batch(9, rows=24)
    for _ in range(outer.sync_every):
        state, info = step(state, placed(rows, mesh, (ROWS, ROWS)))
    assert np.isfinite(info.loss) and int(state.step) == steps + outer.sync_every


def test_what_a_mesh_cannot_take_over_is_said():
    streamed, _ = start(hosts(2, 4), jrc.DiLoCo(4, fragments=2, overlap=1), ON_HOSTS)
    with pytest.raises(ValueError, match="outer must be given with overlap=1 where"):
        jrc.reshard(streamed, 4, mesh=hosts(4, 2), axis_name="replica")
    eight = Mesh(jax.devices(), ("replica",))
    with pytest.raises(ValueError, match="must split the leading axes of params as before"):
        jrc.reshard(streamed, 8, mesh=eight, axis_name="replica")


def kinds(tree):
    """The types of all leaves but keys, which NumPy has not."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return {type(x) for x in jax.tree.leaves(tree) if not is_key(x)}


def test_a_state_of_the_host_stays_there_and_is_placed_by_its_user():
    mesh, _, _, state, _ = ran(AUTO)
    new = jrc.reshard(jax.device_get(state), 4, axis_name="replica")
    assert kinds(new) == {np.ndarray} and same_bits(new.params, state.params)
    before, after = state.opt_state.local, new.opt_state.local
    for name in ("params", "outer", "opt_state"):  # each row twice
        twice = jax.tree.map(lambda x: np.repeat(x, 2, 0), getattr(before, name))
        assert same_bits(twice, getattr(after, name))
    message = (
        "jrc.reshard: state must say how its arrays are split over 'fsdp', 'model' inside of a "
        "replica, got {} without a NamedSharding at 'params/a'. Leave mesh out, "
    )
    for given, kind in ((jax.device_get(state), "ndarray"), (shapes(state), "ShapeDtypeStruct")):
        with pytest.raises(ValueError, match=re.escape(message.format(kind))):
            jrc.reshard(given, 4, mesh=mesh, axis_name="replica")
    streamed, _ = start(hosts(2, 4), jrc.DiLoCo(4, fragments=2, overlap=1), ON_HOSTS)
    more = jrc.reshard(jax.device_get(streamed), 3, axis_name="replica")
    assert kinds(more) == {np.ndarray}
    near(more.opt_state.local.params["a"][2], streamed.params["a"])


def shapes(tree):
    """As `jax.eval_shape`, which forgets how arrays are split."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def test_parameters_split_over_the_replicas_are_refused():
    mesh = mesh_of(2, 2, 2)
    message = r"params must be whole on every replica with outer=.*'a' split over 'replica'"
    with pytest.raises(ValueError, match=message):
        start(mesh, specs=SPECS | {"a": P("replica")})
    with pytest.raises(ValueError, match="via must be 'shard_map' or 'pmap' with outer="):
        start(mesh, via="jit")
    with pytest.raises(ValueError, match="mesh must have one axis with via='pmap'"):
        start(mesh, via="pmap")


@pytest.mark.exhaustive
def test_a_pair_of_axes_beside_one_that_splits():
    mesh = jax.make_mesh((2, 2, 2), ("host", "chip", "fsdp"), axis_types=(AxisType.Auto,) * 3)
    specs = {"a": P("fsdp"), "b": P(), "c": P(None, "fsdp")}
    state, step = start(mesh, DENSE, specs, axis=("chip", "host"))
    two = on_two()
    want, other = start(two, DENSE, whole(specs))
    for i in range(2):
        state, info = step(state, placed(batch(i), mesh, (P(("host", "chip", "fsdp")),) * 2))
        want, alone = other(want, batch(i))
    near(state.params, want.params)
    assert info.losses.shape == (4,) and float(info.bytes_sent) < float(alone.bytes_sent)


@pytest.mark.exhaustive
def test_accumulation_a_budget_and_a_model_state_that_is_split():
    mesh = mesh_of(2, 2, 2)

    def stateful(params, model_state, batch, key):
        loss = loss_fn(params, batch, key)
        mean = 0.5 * model_state["mean"] + 0.5 * params["a"]
        return loss, ({"mean": mean, "count": model_state["count"] + 1}, batch[0].shape[0])

    mean = jax.device_put(jnp.zeros((16, 32)), NamedSharding(mesh, SPECS["a"]))
    first, tx = {"mean": mean, "count": jnp.int32(0)}, optax.sgd(0.1)
    on = {"mesh": mesh, "axis_name": "replica", "outer": DENSE}
    params = placed(some_params(), mesh, SPECS)
    begun = jrc.init_state(params, tx, jax.random.key(0), model_state=first, **on)
    found = []
    for options in ({}, {"accumulate": 2, "memory_budget": 10**9}):
        step = jrc.make_train_step(stateful, tx, donate=False, **on, **options)
        state, infos = run(begun, step, mesh, 2)
        found.append(state)
        assert state.model_state["mean"].sharding.spec == SPECS["a"]
        assert infos[-1].aux.tolist() == [8, 8]
    near(found[0].params, found[1].params)
    assert step.plan is not None and int(found[0].model_state["count"]) == 2


@pytest.mark.exhaustive
def test_arrays_of_an_own_outer_optimizer_lie_one_after_another():
    """Its state is flat, so that it mirrors no parameter."""
    mesh = mesh_of(2, 2, 2)
    state, infos = run(*start(mesh, FlatMean()), mesh, 2)
    want, _ = run(*start(mesh, jrc.DiLoCo(2, 1.0, 0.0)), mesh, 2)
    near(state.params, want.params)
    sums = state.opt_state.shared["sums"]
    assert sums.shape == (4 * (8 * 16 + 32 + 16 * 4),)
    assert sums.sharding.spec == P(("fsdp", "model")) and int(state.opt_state.shared["count"]) == 1


class FlatMean:
    """Plain averaging, with the sum of all messages so far as one array."""

    sync_every, collective = 2, "all_reduce"

    def init(self, params):
        size = sum(x.size for x in jax.tree.leaves(params))
        return None, {"sums": jnp.zeros(size), "count": jnp.int32(0)}

    def encode(self, difference, local):
        flat = jnp.concatenate([x.reshape(-1) for x in jax.tree.leaves(difference)])
        return jrc.outer_optimizers.Encoded(flat, local, jnp.float32(0))

    def decode(self, params, shared, messages, valid):
        mean, start, new = messages / valid.sum(), 0, []
        for x in jax.tree.leaves(params):
            new.append(x - mean[start : start + x.size].reshape(x.shape))
            start += x.size
        shared = {"sums": shared["sums"] + mean, "count": shared["count"] + 1}
        return jax.tree.structure(params).unflatten(new), shared

    def message_words(self, params):
        return sum(x.size for x in jax.tree.leaves(params))

    def entries_sent(self, params):
        return self.message_words(params)


@pytest.mark.slow(after=1, every=True)
@pytest.mark.parametrize("outer", [jrc.SparseLoCo(2, density=1 / 4, chunk=32), None])
def test_a_nan_in_one_shard_stops_the_step_on_all(outer):
    """The gradient of a norm of zero, with a finite loss: XLA's maximum over devices loses it."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AUTO,) * 2)
    w = np.ones((8, 16), np.float32)
    w[:, 5] = 0

    def loss(params, batch, key):
        w = params["w"]
        return jnp.mean((batch @ w) ** 2) + jnp.mean(jnp.sqrt(jnp.sum(w**2, 0)))

    tx = optax.adam(1e-2)
    if outer is None:
        dgc = jrc.scale_by_dgc(0.9, sparsity=(0.5,), axis_name="data", min_size=1)
        tx = optax.chain(dgc, optax.add_decayed_weights(0.1), optax.scale(-0.01))
    given = {"w": jax.device_put(w, NamedSharding(mesh, P(None, "model")))}
    begun = jrc.init_state(given, tx, jax.random.key(0), mesh=mesh, outer=outer)
    step = jrc.make_train_step(loss, tx, mesh=mesh, outer=outer, donate=False)
    state, info = step(begun, np.ones((4, 8), np.float32))
    assert np.all(np.isfinite(info.loss if outer is None else info.losses))
    if outer is None:
        assert info.skipped and same_bits(state.params, begun.params)
    else:
        local = "params", "opt_state"
        now, before = (
            [getattr(each.opt_state.local, name) for name in local] for each in (state, begun)
        )
        assert same_bits(now, before)
