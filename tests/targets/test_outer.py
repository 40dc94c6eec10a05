"""What the compilers of accelerators make of the steps of an outer optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jrc
from jrc.outer_optimizers._internal import Fragment, header_words
from jrc.remat._compiled.collectives import collectives
from jrc.remat._compiled.hlo import parse_hlo
from tests.targets.test_target import needs_cuda, needs_libtpu

SPARSE = jrc.SparseLoCo(15)
PARAMS = {
    "w": jax.ShapeDtypeStruct((256, 192), jnp.float32),
    "b": jax.ShapeDtypeStruct((192,), jnp.float32),
}


def loss(params, batch, key):
    return jnp.mean(jnp.tanh(batch @ params["w"] + params["b"][None]) ** 2)


def sent_by(step, state, batch, mesh, **which):
    """The collectives of a program: kind, and bytes that a device sends."""
    text = step.lower(state, batch, **which).compile().as_text()
    found = collectives(parse_hlo(text), dict(mesh.shape))
    return [(each.kind, each.sent // each.count) for each in found for _ in range(each.count)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param("v5e:2x2", marks=needs_libtpu), pytest.param("h100:4", marks=needs_cuda)],
)
def test_inner_steps_exchange_nothing_and_a_round_the_predicted_bytes(name):
    devices = np.asarray(jrc.target(name).devices)
    mesh = Mesh(devices.reshape(4), ("data",), axis_types=(AxisType.Auto,))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = jrc.init_state(PARAMS, tx, jax.random.key(0), mesh=mesh, outer=SPARSE)
    step = jrc.make_train_step(loss, tx, mesh=mesh, outer=SPARSE)
    rows = NamedSharding(mesh, P("data"))
    batch = jax.ShapeDtypeStruct((32, 256), jnp.float32, sharding=rows)
    assert sent_by(step, state, batch, mesh, closing=False) == []
    words = header_words(Fragment(), None) + SPARSE.message_words(PARAMS)
    # Two levels for each leaf, 64 of 4096 entries of `w` and three of `b`: 14 bits each, in
    # seven words for sixteen.
    assert SPARSE.message_words(PARAMS) == 2 * 2 + (256 * 192 // 64 + 3 + 15) // 16 * 7
    # In a ring a device sends its words to three others.
    assert sent_by(step, state, batch, mesh, closing=True) == [("all-gather", 3 * 4 * words)]
