"""A step whose parameters are split, within a budget that chunks of what a device has reach."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jrc
from tests.draws import integers, normal

TOKENS, WIDTH, WORDS = 128, 32, 4096
TX = optax.sgd(0.1)
ROWS = P("fsdp")


def loss_fn(params, batch, key):
    x, labels = batch[..., :-1], batch[..., -1]
    x = x + jnp.tanh(x @ params["up"]) @ params["down"]
    logits = (x @ params["head"])[:, :-1]
    picked = jnp.take_along_axis(logits, labels[:, 1:, None].astype(int), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked[..., 0])


def start(sizes, names, rows, weights=ROWS, via=None, **options):
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
    shapes = {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH), "head": (WIDTH, WORDS)}
    split = NamedSharding(mesh, weights)
    params = {
        name: jax.device_put(normal(i, *shape, scale=1 / 8), split)
        for i, (name, shape) in enumerate(shapes.items())
    }
    x, labels = normal(3, 16, TOKENS, WIDTH), integers(4, WORDS, 16, TOKENS, 1)
    batch = np.concatenate([x, labels], -1).astype(np.float32)
    batch = jax.device_put(batch, NamedSharding(mesh, P(rows)))
    state = jrc.init_state(params, TX, jax.random.key(0), mesh=mesh, axis_name=names[0])
    via = via or ("jit" if len(names) == 1 else "shard_map")
    step = jrc.make_train_step(
        loss_fn, TX, mesh=mesh, axis_name=names[0], via=via, donate=False, **options
    )
    return state, batch, step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "names", "rows"),
    [((8,), ("fsdp",), "fsdp"), ((2, 4), ("replica", "fsdp"), ("replica", "fsdp"))],
    ids=["fsdp", "hybrid"],
)
def test_each_device_runs_its_part_in_chunks(sizes, names, rows):
    state, batch, plain = start(sizes, names, rows)
    peak = plain.memory(state, batch).peak
    budget = int(0.5 * peak)
    _, _, step = start(sizes, names, rows, memory_budget=budget)
    found = step(state, batch)
    assert step.plan.chunks and step.memory(state, batch).peak <= budget
    assert all(x.parts == sizes[-1] for each in step.plan.chunks for x in each.shards)
    wanted = plain(state, batch)
    for a, b in zip(*(jax.tree.leaves(x[0].params) for x in (found, wanted)), strict=True):
        assert a.sharding == b.sharding
        scale = float(jnp.abs(b).max())
        np.testing.assert_allclose(jax.device_get(a), jax.device_get(b), rtol=0, atol=1e-6 * scale)
    np.testing.assert_allclose(found[1].loss, wanted[1].loss, rtol=1e-6)


@pytest.mark.slow
def test_weights_of_all_columns_stay_split_in_each_chunk():
    """Data and tensor parallelism: no chunk gathers logits, and the plan sends no more bytes."""
    given = {"sizes": (2, 4), "names": ("data", "model"), "rows": "data"}
    given |= {"weights": P(None, "model"), "via": "jit"}
    state, batch, plain = start(**given)
    budget = plain.memory(state, batch).peak // 2
    _, _, step = start(**given, memory_budget=budget)
    found, wanted = (each(state, batch)[0].params for each in (step, plain))
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        scale = float(jnp.abs(b).max())
        np.testing.assert_allclose(jax.device_get(a), jax.device_get(b), rtol=0, atol=1e-6 * scale)
    assert {each.names for each in step.plan.chunks[0].shards[0].split} == {("model",)}
    assert jrc.Plan.from_json(step.plan.to_json()) == step.plan
    reports = (jrc.explain(each, state, batch, argnums=None) for each in (step, plain))
    lean, whole = (sum(each.sent for each in report.collectives) for report in reports)
    assert lean <= 1.1 * whole
