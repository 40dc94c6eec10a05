"""Collectives of the compiled program, their bytes, and the number of branches."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jrc import dgc_advice
from jrc.dgc import dgc_specs, dgc_stats, scale_by_dgc
from jrc.dgc._collectives import dense_mean
from tests.dgc.replicas import AXIS, assert_bit_equal, mesh, normal, stepper

WIDTHS = {"u32": 4, "f32": 4, "s32": 4, "pred": 1}


def collectives(text, kind):
    """Entries and bytes of every array that a kind of collective returns, in an HLO text."""
    found = []
    # A long tuple counts its entries in comments.
    text = re.sub(r"/\*.*?\*/", "", text)
    for results in re.findall(rf" = ([^=]*?) {kind}(?:-start)?\(", text):
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", results):
            size = math.prod(int(n) for n in shape.split(",") if n)
            found.append((size, size * WIDTHS[dtype]))
    return found


def test_dense_mean_of_one_replica_is_itself():
    tensors = [jnp.ones((2, 3)), jnp.zeros(())]
    assert_bit_equal(dense_mean(tensors, None), tensors)
    assert dense_mean([], AXIS) == []


def compiled(tx, params, gradients, replicas=4):
    specs = dgc_specs(jax.eval_shape(tx.init, params), AXIS)
    over = functools.partial(jax.shard_map, mesh=mesh(replicas))
    state = jax.jit(over(tx.init, in_specs=P(), out_specs=specs))(params)

    def one(gradients, state, params):
        return tx.update(jax.tree.map(lambda x: x[0], gradients), state, params)

    step = jax.jit(over(one, in_specs=(P(AXIS), specs, P()), out_specs=(P(), specs)))
    return step.lower(gradients, state, params).compile(), state


PARAMS = {"w": jnp.ones((60, 50)), "x": jnp.ones(2000), "b": jnp.ones(30), "c": jnp.ones((4, 5))}


def test_dense_bytes_are_those_of_the_gradients_dtypes():
    params = {
        "w": jnp.ones(2000, jnp.bfloat16),
        "x": jnp.ones(2000),
        "b": jnp.ones(30, jnp.float16),
    }
    gradients = jax.tree.map(lambda p: jnp.stack([p] * 4), params)
    tx = scale_by_dgc(0.9, sparsity=0.99, axis_name=AXIS, min_size=1000)
    program, state = compiled(tx, params, gradients)
    _, state = jax.block_until_ready(program(gradients, state, params))
    bytes_of_tree = 2000 * 2 + 2000 * 4 + 30 * 2
    assert float(dgc_stats(state).bytes_dense) == 2 * 3 / 4 * bytes_of_tree
    advice = dgc_advice(params, 4, "1Gbit/s", 0.1, sparsity=0.99, min_size=1000)
    assert advice.uncompressed.bytes == 2 * 3 / 4 * bytes_of_tree
    # DGC adds up in float32, whatever the gradients are.
    assert advice.dense.bytes == 2 * 3 / 4 * 4 * 4030
    # Two of four owners have one leaf each; rows for all of them are as long as theirs.
    assert advice.sharded.bytes == 2 * 3 * 8 * 20 + 2 * 3 / 4 * 4 * 30


def test_one_gather_of_the_predicted_bytes_and_no_large_sum():
    gradients = jax.tree.map(lambda g: g[0], normal(0, PARAMS, 1, 4))
    tx = scale_by_dgc(0.9, sparsity=0.99, axis_name=AXIS, min_size=1000)
    program, state = compiled(tx, PARAMS, gradients)
    text = program.as_text()
    payload = 8 * (30 + 20)
    # The result contains the payload of every replica.
    assert collectives(text, "all-gather") == [(4 * 2 * 50, 4 * payload)]
    assert sorted(collectives(text, "all-reduce")) == [(1, 4), (50, 200)]
    for kind in ("all-to-all", "collective-permute", "reduce-scatter"):
        assert collectives(text, kind) == []
    _, state = jax.block_until_ready(program(gradients, state, PARAMS))
    stats = dgc_stats(state)
    assert float(stats.bytes_sent) == 3 * payload + 2 * 3 / 4 * 200
    assert float(stats.bytes_received) == float(stats.bytes_sent)
    assert float(stats.bytes_dense) == 2 * 3 / 4 * 4 * (3000 + 2000 + 30 + 20)
    assert float(stats.density) == np.float32(0.01)


def test_dense_exchange_gathers_nothing():
    gradients = jax.tree.map(lambda g: g[0], normal(0, PARAMS, 1, 4))
    tx = scale_by_dgc(0.9, sparsity=0.99, axis_name=AXIS, min_size=1000, exchange="dense")
    text = compiled(tx, PARAMS, gradients)[0].as_text()
    assert collectives(text, "all-gather") == []
    assert sorted(collectives(text, "all-reduce")) == [(1, 4), (50, 200), (5000, 20000)]


@pytest.mark.slow(after=2, every=True)
@pytest.mark.parametrize(
    ("settings", "branches"),
    [
        ({}, 1),
        ({"exchange": "dense", "sparsity": (0.5, 0.9, 0.99), "rampup_step": 9}, 1),
        ({"sparsity": (0.75, 0.9, 0.99), "rampup_step": 9}, 2),
        ({"sparsity": (0.75, 0.9, 0.99), "rampup_step": 9, "exchange": "allgather"}, 3),
        ({"rampup_begin_step": 5}, 2),
        # With a ramp of one step the levels in the middle never run.
        ({"sparsity": (0.75, 0.9, 0.99), "exchange": "dense", "rampup_begin_step": 1}, 2),
        ({"sparsity": (0.8, 0.9, 0.95, 0.99), "exchange": "allgather"}, 2),
    ],
)
def test_no_branch_that_cannot_run(settings, branches):
    tx = scale_by_dgc(0.9, min_size=1000, **settings)
    jaxpr = jax.make_jaxpr(tx.update)(PARAMS, tx.init(PARAMS), PARAMS)
    # A choice by platform is no branch: one of its programs is lowered.
    switches = [e for e in jaxpr.eqns if e.primitive.name == "cond"]
    found = [len(e.params["branches"]) for e in switches if not e.params.get("branches_platforms")]
    assert found == ([branches] if branches > 1 else [])


@pytest.mark.slow(after=1, every=True)
@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_other_numbers_of_replicas(replicas):
    params = {"w": jnp.zeros(400)}
    gradients = jax.tree.map(lambda g: g[0], normal(1, params, 1, replicas))
    tx = scale_by_dgc(0.9, sparsity=0.0, axis_name=AXIS, min_size=1, exchange="allgather")
    state, step = stepper(tx, params, replicas)
    updates, state = jax.block_until_ready(step(gradients, state, params))
    np.testing.assert_allclose(updates["w"], gradients["w"].mean(0), atol=1e-6)
    assert float(state.bytes_sent) == (replicas - 1) * 8 * 400
