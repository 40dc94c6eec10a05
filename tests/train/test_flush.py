"""One dense step for what was not sent: the formula, its meaning, placements, saves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jrc
from jrc.dgc._internal import dgc_states
from tests.train.tasks import same_bits

REPLICAS, RATE, STEPS = 4, 0.1, 5


def on(count=REPLICAS):
    return Mesh(jax.devices()[:count], ("data",))


def params():
    draw = np.random.default_rng(0)
    return {"b": jnp.zeros(5), "w": jnp.asarray(draw.normal(size=(16, 5)), jnp.float32)}


def linear(params, batch, key):
    """A loss whose gradient does not depend on the parameters."""
    return jnp.mean(batch @ params["w"]) + jnp.mean(batch[:, :5] @ params["b"])


def batches(rows=8):
    draw = np.random.default_rng(1)
    return [draw.normal(size=(rows, 16)).astype(np.float32) for _ in range(STEPS)]


def run(tx, mesh=None, params_=None, axis="data", **options):
    mesh = mesh or on()
    state = jrc.init_state(params_ or params(), tx, jax.random.key(0), mesh=mesh, axis_name=axis)
    step = jrc.make_train_step(linear, tx, mesh=mesh, axis_name=axis, **options)
    for batch in batches():
        state, _ = step(state, batch)
    return state


def compress(momentum=0.9, axis="data", **options):
    return jrc.dgc_momentum(
        RATE,
        momentum,
        0,
        sparsity=0.9,
        min_size=20,
        axis_name=axis,
        exchange="allgather",
        **options,
    )


@pytest.fixture(scope="module")
def ran():
    return run(compress())


def kept(state):
    (dgc,) = dgc_states(state.opt_state)
    return dgc


def test_the_mean_of_what_was_kept_is_applied(ran):
    v = np.asarray(kept(ran).v["w"], np.float64)
    assert v.shape == (REPLICAS, 16, 5) and np.abs(v).max() > 0
    want = np.asarray(ran.params["w"], np.float64) - RATE * v.sum(0) / REPLICAS
    new = jrc.flush(ran, RATE)
    np.testing.assert_allclose(new.params["w"], want, rtol=1e-6, atol=1e-7)
    assert not np.asarray(kept(new).u["w"]).any() and not np.asarray(kept(new).v["w"]).any()
    same = new.opt_state[0]._replace(u=kept(ran).u, v=kept(ran).v), *new.opt_state[1:]
    back = new._replace(params={**new.params, "w": ran.params["w"]}, opt_state=same)
    assert same_bits(back, ran)
    assert same_bits(jrc.flush(new, RATE), new)


def test_replicas_are_equal_and_placed_as_before(ran):
    new = jrc.flush(ran, jnp.float32(RATE))
    copies = [np.asarray(shard.data).tobytes() for shard in new.params["w"].addressable_shards]
    assert len(copies) == REPLICAS and len(set(copies)) == 1
    placed = lambda x, y: x.sharding.is_equivalent_to(y.sharding, x.ndim)  # noqa: E731
    assert jax.tree.all(jax.tree.map(placed, new, ran))


def test_without_momentum_all_that_dense_training_applies_is_applied():
    """Gradients do not depend on parameters: what was sent and what was kept is all there was."""
    sparse = jrc.flush(run(compress(momentum=0.0)), RATE)
    dense = run(optax.sgd(RATE))
    for name in ("w", "b"):
        np.testing.assert_allclose(sparse.params[name], dense.params[name], rtol=1e-5, atol=1e-6)


def test_training_goes_on_and_a_save_is_as_it_was(tmp_path, ran):
    new = jrc.flush(ran, RATE)
    jrc.save(tmp_path, new)
    assert same_bits(jrc.restore(tmp_path, ran), new)
    step = jrc.make_train_step(linear, compress(), mesh=on(), donate=False)
    after, info = step(new, batches()[0])
    assert int(after.step) == STEPS + 1 and not bool(info.skipped)


def test_memory_is_used_again(ran):
    mine = jax.tree.map(jnp.copy, ran)
    new = jrc.flush(mine, RATE, donate=True)
    assert mine.params["w"].is_deleted() and kept(mine).v["w"].is_deleted()
    assert same_bits(new, jrc.flush(ran, RATE))


def test_inside_of_a_program_and_from_shapes(ran):
    want = jrc.flush(ran, RATE)
    got = jax.jit(jrc.flush)(ran, RATE)
    np.testing.assert_allclose(got.params["w"], want.params["w"], rtol=1e-6)
    shapes = jax.eval_shape(lambda s: jrc.flush(s, RATE), ran)
    assert jax.tree.structure(shapes) == jax.tree.structure(ran)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_parameters_that_are_split(kind):
    mesh = jax.make_mesh(
        (2, 2), ("data", "fsdp"), axis_types=(kind,) * 2, devices=jax.devices()[:4]
    )
    tx = compress()
    split = {"b": P(), "w": P("fsdp")}
    own = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), params(), split)
    state = jrc.init_state(own, tx, jax.random.key(0), mesh=mesh)
    rows = jax.device_put(
        np.random.default_rng(2).normal(size=(2, 16, 5)).astype(np.float32),
        kept(state).v["w"].sharding,
    )
    dgc = kept(state)._replace(v={**kept(state).v, "w": rows})
    state = state._replace(opt_state=(dgc, *state.opt_state[1:]))
    new = jrc.flush(state, RATE)
    want = np.asarray(own["w"]) - RATE * np.asarray(rows).mean(0)
    np.testing.assert_allclose(new.params["w"], want, rtol=1e-6, atol=1e-7)
    placed = lambda x, y: x.sharding == y.sharding  # noqa: E731
    assert jax.tree.all(jax.tree.map(placed, new, state))


@pytest.mark.slow
def test_masks_half_precision_and_pmap():
    """Two compressions of a tree with whole subtrees masked out; bfloat16; rows made by pmap."""
    tree = {"head": {"b": jnp.ones(5)}, "w": params()["w"].astype(jnp.bfloat16)}
    labels = {"head": "dense", "w": "sparse"}
    tx = optax.multi_transform({"dense": optax.sgd(RATE), "sparse": compress()}, labels)

    def loss(params, batch, key):
        return linear({"b": params["head"]["b"], "w": params["w"].astype(jnp.float32)}, batch, key)

    state = jrc.init_state(tree, tx, jax.random.key(0), mesh=on())
    step = jrc.make_train_step(loss, tx, mesh=on(), via="pmap")
    state, _ = step(state, batches()[0])
    new = jrc.flush(state, RATE)
    assert new.params["w"].dtype == jnp.bfloat16
    want = np.asarray(state.params["w"], np.float32) - RATE * np.asarray(kept(state).v["w"]).mean(0)
    want = np.asarray(jnp.asarray(want, jnp.bfloat16), np.float32)
    np.testing.assert_allclose(np.asarray(new.params["w"], np.float32), want, rtol=2**-7)
    assert same_bits(new.params["head"], state.params["head"])
    step(new, batches()[1])
