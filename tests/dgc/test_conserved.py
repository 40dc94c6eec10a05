"""Conservation: what was sent and what is kept add up to what was accumulated, every step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jrc.dgc import scale_by_dgc
from tests.dgc.replicas import AXIS, mesh

MOMENTUM, STEPS = 0.5, 7
FIXED = {"sparsity": 0.9}
RAMP = {"sparsity": (0.5, 0.95), "rampup_begin_step": 2, "rampup_step": 4}
ALL_BUT_NONE = {"sparsity": 0.999999}
EVERYTHING = {"sparsity": 0.0}

CASES = [
    # exchange, selector, wire, replicas, schedule, dtype of the gradients
    ("allgather", "exact", "f32", 4, RAMP, "float32"),
    ("allgather", "two_stage", "bf16", 2, FIXED, "bfloat16"),
    ("allgather", "blocked", "fp8", 4, FIXED, "float32"),
    ("allgather", "global", "int8", 8, FIXED, "float32"),
    ("allgather", "sampled", "f32", 1, EVERYTHING, "float32"),
    ("sharded", "auto", "f32", 8, RAMP, "float32"),
    ("sharded", "blocked", "bf16", 4, EVERYTHING, "bfloat16"),
    ("sharded", "auto", "fp8", 2, FIXED, "float32"),
    ("sharded", "blocked", "int8", 1, FIXED, "float32"),
    ("auto", "exact", "bf16", 4, RAMP, "float32"),
    ("auto", "two_stage", "fp8", 8, FIXED, "float32"),
    ("auto", "blocked", "int8", 2, RAMP, "float32"),
    ("auto", "global", "f32", 4, ALL_BUT_NONE, "bfloat16"),
    ("auto", "sampled", "bf16", 8, FIXED, "float32"),
    ("dense", "exact", "f32", 4, RAMP, "float32"),
]


def tree(seed):
    """Return leaves of odd sizes; those below 30 entries are not compressed."""
    rng = np.random.default_rng(seed)
    sizes = [1, 7, *rng.integers(30, 3000, 2)]
    return {f"leaf{i}": jnp.zeros(int(size)) for i, size in enumerate(sizes)}


def recorded(tx, params, gradients, replicas):
    """Updates, and every replica's u and v, after each step."""

    def body(state, gradient):
        updates, state = tx.update(gradient, state)
        return state, (updates, state.u, state.v)

    def one(gradients):
        state = tx.init(params)
        updates, u, v = jax.lax.scan(body, state, jax.tree.map(lambda x: x[:, 0], gradients))[1]
        return updates, u, v

    specs = (P(), P(None, AXIS), P(None, AXIS))
    over = functools.partial(jax.shard_map, mesh=mesh(replicas))
    run = jax.jit(over(one, in_specs=P(None, AXIS), out_specs=specs))
    return jax.tree.map(lambda x: np.asarray(x, np.float64), run(gradients))


def some_gradients(params, replicas, dtype, whole):
    """Small integers, that float32 adds without rounding; or normal numbers."""
    rng = np.random.default_rng(replicas)

    def draw(leaf):
        shape = (STEPS, replicas, *leaf.shape)
        drawn = rng.integers(-8, 9, shape) if whole else rng.standard_normal(shape)
        return jnp.asarray(drawn, dtype)

    return jax.tree.map(draw, params)


@pytest.mark.exhaustive(after=6)
@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("exchange", "selector", "wire", "replicas", "schedule", "dtype"),
    CASES,
    ids=lambda x: str(x.get("sparsity")) if isinstance(x, dict) else str(x),
)
def test_sent_plus_kept_is_accumulated(exchange, selector, wire, replicas, schedule, dtype):
    begin = schedule.get("rampup_begin_step", 0)
    params = tree(len(exchange) + len(selector))
    tx = scale_by_dgc(
        MOMENTUM,
        axis_name=AXIS,
        min_size=30,
        exchange=exchange,
        selector=selector,
        wire=wire,
        **schedule,
    )
    # Eight bits are not exact, and bfloat16 updates are rounded.
    exact = wire in ("f32", "bf16") and dtype == "float32"
    gradients = some_gradients(params, replicas, dtype, whole=exact)
    updates, us, vs = recorded(tx, params, gradients, replicas)
    tolerance = {"float32": 3e-6, "bfloat16": 2.0**-7}[dtype] * (not exact)
    for name, leaf in params.items():
        if leaf.size < 30:
            continue
        u, v = np.zeros((2, replicas, leaf.size))
        for step in range(STEPS):
            u = MOMENTUM * u + np.asarray(gradients[name], np.float64)[step]
            v = v + u * (step >= begin)
            # Before `begin`, u is the velocity of the mean gradient, and all of it is sent.
            there = v.mean(0) if step >= begin else u.mean(0)
            kept = vs[name][step].mean(0)
            close = {"rtol": 0, "atol": tolerance * (np.abs(v).max() + np.abs(u).max())}
            np.testing.assert_allclose(updates[name][step] + kept, there, **close)
            u, v = us[name][step], vs[name][step]
        assert np.abs(updates[name][begin:]).max() > 0
        assert (np.abs(v).max() > 0) == (schedule is not EVERYTHING or not exact)


@pytest.mark.slow(after=4, every=True)
@pytest.mark.parametrize("wire", ["f32", "bf16", "fp8", "int8"])
@pytest.mark.parametrize("selector", ["exact", "two_stage", "blocked", "global", "sampled"])
def test_a_dense_sum_ignores_selector_and_wire(selector, wire):
    params = tree(0)
    programs = [
        jax.make_jaxpr(tx.update)(params, tx.init(params))
        for tx in (
            scale_by_dgc(sparsity=0.9, min_size=30, exchange="dense"),
            scale_by_dgc(sparsity=0.9, min_size=30, exchange="dense", selector=selector, wire=wire),
        )
    ]
    assert str(programs[0]) == str(programs[1])
