"""Local steps and rounds through `make_train_step(outer=...)`: programs, states, failures."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jrc
from tests.draws import normal
from tests.train.tasks import same_bits

REPLICAS, ROWS, WIDTH = 4, 64, 128
SPARSE = jrc.SparseLoCo(3)


def on(count=REPLICAS):
    return Mesh(jax.devices()[:count], ("data",))


def params():
    return {"b": jnp.zeros(WIDTH), "w": normal(0, ROWS, WIDTH, scale=0.1)}


def loss_fn(params, batch, key):
    x, y = batch
    out = jnp.tanh(x @ params["w"] + params["b"][None])
    return jnp.mean((out - y) ** 2), {"rows": x.shape[0], "mean": jnp.mean(out)}


def batch(i, rows=16):
    rng = np.random.default_rng(i)
    x = rng.normal(size=(rows, ROWS)).astype(np.float32)
    return x, np.tanh(x[:, :1] + np.zeros((1, WIDTH), np.float32))


def adamw():
    rate = optax.linear_schedule(1e-3, 1e-2, 12)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))


def start(outer=SPARSE, tx=None, mesh=None, **options):
    tx, mesh = tx or adamw(), mesh or on()
    state = jrc.init_state(params(), tx, jax.random.key(1), mesh=mesh, outer=outer)
    return state, jrc.make_train_step(loss_fn, tx, mesh=mesh, outer=outer, **options)


def run(state, step, steps, begin=0):
    infos = []
    for i in range(begin, begin + steps):
        state, info = step(state, batch(i))
        infos.append(jax.device_get(info))
    return state, infos


def rows_are_equal(tree, replicas=REPLICAS):
    return all(
        np.asarray(x).reshape(replicas, -1).tobytes() == np.asarray(x[:1]).tobytes() * replicas
        for x in jax.tree.leaves(tree)
    )


@pytest.fixture(scope="module")
def ran():
    """Seven steps, two rounds and one more, without donation."""
    state, step = start(donate=False)
    states, infos = [state], []
    for i in range(7):
        state, info = step(state, batch(i))
        states.append(state)
        infos.append(jax.device_get(info))
    return step, states, infos


def test_rounds_come_every_few_steps_and_say_what_they_sent(ran):
    _, states, infos = ran
    assert [bool(info.synchronised) for info in infos] == [False, False, True] * 2 + [False]
    words = SPARSE.message_words(params()) + 5
    sent = 4.0 * words * (REPLICAS - 1)
    assert [float(info.bytes_sent) for info in infos] == [0, 0, sent, 0, 0, sent, 0]
    density = SPARSE.entries_sent(params()) / (ROWS * WIDTH + WIDTH)
    np.testing.assert_allclose([info.density for info in infos][:3], [0, 0, density], rtol=1e-6)
    assert [int(x.opt_state.rounds) for x in states] == [0, 0, 0, 1, 1, 1, 2, 2]
    for before, after, info in zip(states, states[1:], infos, strict=False):
        assert same_bits(before.params, after.params) != bool(info.synchronised)


def test_a_report_has_the_losses_of_the_step_and_the_mean_of_the_last_round(ran):
    _, _, infos = ran
    assert np.isnan([info.loss for info in infos[:2]]).all()
    means = [np.mean([info.losses for info in infos[i : i + 3]]) for i in (0, 3)]
    np.testing.assert_allclose(
        [info.loss for info in infos[2:]], [*[means[0]] * 3, *[means[1]] * 2], rtol=1e-6
    )
    assert infos[0].aux["rows"].tolist() == [4] * REPLICAS and infos[0].aux["mean"].shape == (4,)
    assert infos[2].norm_kept > 0 and infos[2].grad_norm > 0 and infos[2].left_out == 0


@jax.custom_vjp
def spoilt(w, bad):
    return w


spoilt.defvjp(
    lambda w, bad: (w, bad), lambda bad, ct: (ct.at[3, 5].add(jnp.where(bad, jnp.nan, 0)), None)
)


@pytest.mark.parametrize("outer", [SPARSE, None])
def test_one_nan_in_the_gradient_of_a_large_leaf_skips_the_step(outer):
    """The loss is finite, and of the gradient one entry is not: XLA's maximum may lose it."""

    def loss(params, batch, key):
        x, bad = batch
        return jnp.mean(jnp.tanh(x @ spoilt(params["w"], bad.any())) ** 2)

    tx = optax.sgd(0.1) if outer else jrc.dgc_momentum(0.1, 0.9, 0, axis_name="data")
    given = {"w": jnp.ones((256, 256)) / 256}
    begun = jrc.init_state(given, tx, jax.random.key(0), mesh=on(), outer=outer)
    step = jrc.make_train_step(loss, tx, mesh=on(), outer=outer, donate=False)
    x = np.ones((8, 256), np.float32)
    state, info = step(begun, (x, np.arange(8) == 7))
    assert np.isfinite(info.loss if outer is None else info.losses).all()
    if outer is None:
        assert info.skipped and same_bits(state.params, begun.params)
        return
    for i, (now, before) in enumerate(
        zip(state.opt_state.local.params["w"], begun.opt_state.local.params["w"], strict=True)
    ):
        assert np.isfinite(now).all() and same_bits(now, before) == (i == REPLICAS - 1)


def test_replicas_differ_within_a_round_and_are_bit_equal_after_it(ran):
    _, states, _ = ran
    for number, state in enumerate(states):
        local = state.opt_state.local
        assert rows_are_equal(local.params) == (number % 3 == 0)
        if number % 3 == 0:
            assert same_bits(jax.tree.map(lambda x: x[0], local.params), state.params)
        # Schedules count inner steps.
        counts = [x for x in jax.tree.leaves(local.opt_state) if x.dtype == jnp.int32]
        assert counts and all(x.tolist() == [number] * REPLICAS for x in counts)
    assert not rows_are_equal(states[3].opt_state.local.outer)


def collectives(step, state, **which):
    text = step.lower(state, batch(0), **which).compile().as_text()
    found = r"= \(?(\S+?)\{.*? (all-\w+|collective-\w+|reduce-\w+)(?:-start)?\("
    return [pair for pair in re.findall(found, text) if pair[1] != "reduce-window"]


def test_inner_steps_have_no_collective_and_a_round_has_one_of_the_predicted_bytes(ran):
    step, states, _ = ran
    assert collectives(step, states[0], closing=False) == []
    levels = 2 * 2
    # 0.21875 bits for each parameter of the matrix; a bias of 128 entries sends two.
    entries = (ROWS * WIDTH // 64 + 2 + 14) // 16 * 7
    assert 32 * (ROWS * WIDTH // 64 * 14 // 32) == 0.21875 * ROWS * WIDTH
    assert SPARSE.message_words(params()) == levels + entries
    words = 5 + levels + entries
    assert collectives(step, states[0], closing=True) == [
        (f"u32[{REPLICAS},{words}]", "all-gather")
    ]


def test_inner_steps_write_parameters_and_moments_in_place():
    state, step = start(mesh=on(1))
    compiled = step.lower(state, batch(0), closing=False).compile()
    entry = compiled.as_text().partition("\nENTRY")[2]
    leaf = rf"f32\[(1,)?{ROWS},{WIDTH}\]"
    assert re.search(rf"{leaf}\S* fusion\(", entry)
    assert not re.search(rf"{leaf}\S* copy\(", entry)
    memory = compiled.memory_analysis()
    inputs = sum(x.nbytes for x in batch(0))
    assert memory.alias_size_in_bytes == memory.argument_size_in_bytes - inputs


@pytest.mark.slow
def test_every_step_with_everything_sent_is_dense_sgd():
    outer = jrc.SparseLoCo(1, density=1, error_decay=1.0, wire="f32")
    state, step = start(outer, optax.sgd(0.1))
    state, infos = run(state, step, 4)
    dense = jrc.init_state(params(), optax.sgd(0.1), jax.random.key(1), mesh=on())
    step = jrc.make_train_step(loss_fn, optax.sgd(0.1), mesh=on())
    dense, want = run(dense, step, 4)
    for got, x in zip(jax.tree.leaves(state.params), jax.tree.leaves(dense.params), strict=True):
        np.testing.assert_allclose(got, x, rtol=0, atol=1e-6)
    np.testing.assert_allclose([x.loss for x in infos], [x.loss for x in want], rtol=1e-5)
    assert all(x.synchronised and x.losses is None for x in want)


def test_a_restored_run_goes_on_bit_for_bit_within_a_round(ran, tmp_path):
    step, states, _ = ran
    jrc.save(tmp_path / "state", states[4])
    fresh, other = start(donate=False)
    state = jrc.restore(tmp_path / "state", fresh)
    assert same_bits(state, states[4])
    state, _ = run(state, other, 3, begin=4)
    assert same_bits(state, states[7])
    # An older state is not the one that the last call returned.
    state, info = step(states[2], batch(2))
    assert bool(info.synchronised) and same_bits(state, states[3])


@pytest.mark.slow
def test_pmap_gives_the_same(ran):
    _, states, infos = ran
    state, step = start(via="pmap")
    state, found = run(state, step, 3)
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(states[3].params), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    np.testing.assert_allclose(found[2].losses, infos[2].losses, rtol=1e-5)
    assert found[0].aux["rows"].tolist() == [4] * REPLICAS


@pytest.mark.slow
def test_one_device_needs_no_exchange():
    state, step = start(mesh=on(1), via="jit")
    state, infos = run(state, step, 3)
    assert float(infos[2].bytes_sent) == 0 and bool(infos[2].synchronised)
    assert np.isfinite(float(infos[2].loss)) and infos[2].losses.shape == (1,)


@pytest.mark.parametrize("outer", [SPARSE, pytest.param(jrc.DiLoCo(3), marks=pytest.mark.slow)])
def test_what_is_not_finite_is_left_out_everywhere_in_the_same_way(outer):
    state, step = start(outer, donate=False)
    begun, _ = run(state, step, 3)
    state = begun
    for i in (3, 4, 5):
        x, y = batch(i)
        if i == 4:
            x[4:8] = np.nan  # the second replica's part
        state, info = step(state, (x, y))
    assert int(info.left_out) == 1 == int(state.opt_state.report.left_out)
    assert not bool(info.skipped) and np.isfinite(float(info.loss))
    local = state.opt_state.local
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state.params, local)))
    assert rows_are_equal(local.params) and local.failed.tolist() == [0] * REPLICAS
    old = begun.opt_state.local.outer
    if old is not None:  # what it has not sent stays as it was
        assert same_bits(
            jax.tree.map(lambda x: x[1], old), jax.tree.map(lambda x: x[1], local.outer)
        )
    # The others go on, and so does it.
    state, infos = run(state, step, 3, begin=6)
    assert int(infos[2].left_out) == 0
    bad = batch(9)[0] * np.nan, batch(9)[1]
    for _ in range(3):
        before = state.params
        state, info = step(state, bad)
    assert int(info.left_out) == REPLICAS and bool(info.skipped) and same_bits(state.params, before)


@pytest.mark.slow
def test_accumulation_and_a_budget_are_for_both_programs():
    state, step = start(donate=False)
    want, _ = run(state, step, 3)
    _, step = start(accumulate=2, memory_budget=10**9, donate=False)
    got, _ = run(state, step, 3)
    for a, b in zip(jax.tree.leaves(got.params), jax.tree.leaves(want.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    assert step.plan is not None and step.memory(state, batch(0)).peak > 0


@pytest.mark.slow
def test_a_pair_of_axes_averages_gradients_inside_and_exchanges_outside():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("hosts", "chips"))
    axes = {"mesh": mesh, "axis_name": ("chips", "hosts")}
    tx = adamw()
    state = jrc.init_state(params(), tx, jax.random.key(1), outer=SPARSE, **axes)
    step = jrc.make_train_step(loss_fn, tx, outer=SPARSE, **axes)
    state, infos = run(state, step, 3)
    flat, step = start()
    flat, _ = run(flat, step, 3)
    assert infos[0].losses.shape == (8,) and rows_are_equal(state.opt_state.local.params)
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(flat.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_running_statistics_are_averaged_in_a_round():
    def stateful(params, model_state, batch, key):
        loss, _ = loss_fn(params, batch, key)
        mean = 0.5 * model_state["mean"] + 0.5 * batch[0].mean(0)
        return loss, ({"mean": mean, "count": model_state["count"] + 1}, None)

    first = {"mean": jnp.zeros(ROWS), "count": jnp.int32(0)}
    tx, outer = optax.sgd(0.01), jrc.SparseLoCo(2)
    options = {"mesh": on(), "outer": outer}
    state = jrc.init_state(params(), tx, jax.random.key(1), model_state=first, **options)
    step = jrc.make_train_step(stateful, tx, **options)
    state, _ = run(state, step, 2)
    x = [batch(i)[0] for i in range(2)]
    want = 0.25 * x[0].mean(0) + 0.5 * x[1].mean(0)
    np.testing.assert_allclose(state.model_state["mean"], want, rtol=0, atol=1e-6)
    assert int(state.model_state["count"]) == 2
    assert rows_are_equal(state.opt_state.local.model_state)


@pytest.mark.slow
def test_statistics_that_are_not_finite_on_one_replica_stay_there():
    """Though its loss and its parameters are."""

    def stateful(params, model_state, batch, key):
        loss, _ = loss_fn(params, batch, key)
        best = jnp.where(batch[1].max() > 1e3, jnp.nan, 1.0)
        return loss, ({"best": best, "least": model_state["least"]}, None)

    first = {"best": jnp.zeros(()), "least": jnp.full((), -jnp.inf)}
    tx, options = optax.sgd(1e-9), {"mesh": on(), "outer": jrc.SparseLoCo(1)}
    state = jrc.init_state(params(), tx, jax.random.key(1), model_state=first, **options)
    x, y = batch(0)
    y[4:8] = 1e4
    state, info = jrc.make_train_step(stateful, tx, **options)(state, (x, y))
    assert int(info.left_out) == 1 and float(state.model_state["best"]) == 1.0
    assert float(state.model_state["least"]) == -np.inf


def test_differences_of_float64_are_not_those_of_rounded_parameters():
    with jax.enable_x64(True):
        tx, options = optax.sgd(1.0), {"mesh": on(1), "outer": jrc.DiLoCo(1, 1.0, 0.0)}
        begun = jrc.init_state({"w": jnp.ones(2)}, tx, jax.random.key(1), **options)
        loss = lambda params, batch, key: 1e-9 * params["w"].sum()  # noqa: E731
        state, _ = jrc.make_train_step(loss, tx, **options)(begun, jnp.zeros(1))
        np.testing.assert_allclose(state.params["w"], 1 - 1e-9, rtol=0, atol=1e-15)


slow = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [3, pytest.param(2, marks=slow), pytest.param(8, marks=slow)])
def test_workers_leave_and_join_between_rounds(ran, tmp_path, replicas):
    _, states, _ = ran
    mesh = on(replicas)
    fresh, step = start(mesh=mesh)
    jrc.save(tmp_path / "state", states[3])
    like = jrc.reshard(jax.eval_shape(lambda: fresh), REPLICAS, mesh=mesh)
    state = jrc.reshard(jrc.restore(tmp_path / "state", like), replicas, mesh=mesh)
    assert jax.tree.map(np.shape, state) == jax.tree.map(np.shape, fresh)
    assert same_bits(state.params, states[3].params)
    assert rows_are_equal(state.opt_state.local.params, replicas)
    old, new = states[3].opt_state.local, state.opt_state.local
    for a, b in zip(jax.tree.leaves(old.outer), jax.tree.leaves(new.outer), strict=True):
        np.testing.assert_allclose(a.mean(0), b.mean(0), rtol=0, atol=1e-6)
    x, y = batch(3, rows=24)
    for _ in range(3):
        state, info = step(state, (x, y))
    assert bool(info.synchronised) and np.isfinite(float(info.loss)) and int(state.step) == 6


@pytest.mark.exhaustive
def test_workers_leave_a_mesh_of_explicit_axes():
    mesh, fewer = (jax.make_mesh((n,), ("data",), devices=jax.devices()[:n]) for n in (4, 2))
    state, step = start(jrc.SparseLoCo(1), mesh=mesh)
    state, _ = run(state, step, 1)
    state = jrc.reshard(state, 2, mesh=fewer)
    _, step = start(jrc.SparseLoCo(1), mesh=fewer)
    _, infos = run(state, step, 1, begin=1)
    assert np.isfinite(float(infos[0].loss)) and infos[0].losses.shape == (2,)


@pytest.mark.slow
def test_a_batch_on_the_devices_and_a_state_of_shapes(ran):
    step, states, infos = ran
    placed = jax.device_put(batch(2), NamedSharding(on(), PartitionSpec("data")))
    _, info = step(states[2], placed)
    np.testing.assert_array_equal(info.losses, infos[2].losses)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), states[0]
    )
    assert step.memory(shapes, batch(0)).peak > 0
