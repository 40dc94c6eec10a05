"""A step inside of `jax.jit` or `lax.scan`: types of traced arrays name no automatic mesh axis."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jrc

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
SPECS = {"w": P(None, "tp"), "b": P(None, "tp")}
DGC = functools.partial(jrc.dgc_momentum, 0.1, 0.9, 0, sparsity=0.9, min_size=0, axis_name="data")
BATCH = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)


def loss_fn(params, batch, key):
    return jnp.mean((jnp.tanh(batch @ params["w"]) + params["b"]) ** 2)


def params_on(mesh, specs):
    draw = np.random.default_rng(1)
    params = {"w": draw.normal(size=(8, 8)) * 0.3, "b": np.zeros((1, 8))}
    put = lambda x, spec: jax.device_put(jnp.float32(x), NamedSharding(mesh, spec))  # noqa: E731
    return jax.tree.map(put, params, specs)


def start(tx, mesh, specs, loss=loss_fn, **options):
    run = {"mesh": mesh, "axis_name": mesh.axis_names[0]}
    state = jrc.init_state(params_on(mesh, specs), tx, jax.random.key(0), **run)
    return state, jrc.make_train_step(loss, tx, donate=False, **run, **options)


def specs_of(state):
    return [x.sharding.spec for x in jax.tree.leaves(state) if x.ndim]


def in_a_loop(step, state):
    return jax.jit(lambda s: jax.lax.scan(step, s, np.stack([BATCH] * 2)))(state)


def test_a_step_of_fsdp_keeps_its_split():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AUTO,))
    state, step = start(optax.adam(0.1), mesh, {"w": P("fsdp"), "b": P(None, "fsdp")}, via="jit")
    wanted, _ = step(state, BATCH)
    inside, _ = jax.jit(step)(state, BATCH)
    assert specs_of(inside) == specs_of(wanted)
    # Nothing is known of it here: XLA chooses.
    _, fresh = start(optax.adam(0.1), mesh, {"w": P("fsdp"), "b": P(None, "fsdp")}, via="jit")
    found, _ = jax.jit(fresh)(state, BATCH)
    np.testing.assert_allclose(found.params["w"], wanted.params["w"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("tx", [optax.adam(0.1), DGC()], ids=["adam", "dgc"])
def test_split_replicas_keep_their_split(kind, tx):
    mesh = jax.make_mesh((2, 4), ("data", "tp"), axis_types=(kind, kind))
    state, step = start(tx, mesh, SPECS)
    if kind is AUTO:
        with pytest.raises(ValueError, match="must know how they are split, got a traced state"):
            jax.jit(step)(state, BATCH)
        step.lower(state, BATCH)
    traced, report = jax.jit(step)(state, BATCH)
    wanted, info = step(state, BATCH)
    assert specs_of(traced) == specs_of(wanted)
    assert float(report.bytes_sent) == float(info.bytes_sent)
    assert all(map(np.array_equal, *map(jax.tree.leaves, (traced.params, wanted.params))))
    looped, _ = in_a_loop(step, state)
    twice, _ = step(wanted, BATCH)
    np.testing.assert_allclose(looped.params["w"], twice.params["w"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("places", [False, True])
def test_a_budget_is_kept_in_a_loop(places):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AUTO,))
    specs = {"w": P(), "b": P()}
    state, step = start(optax.adam(0.1), mesh, specs, memory_budget="1MiB")
    looped, infos = in_a_loop(step, state)
    plan = step.plan
    assert plan.verified.peak_bytes <= 2**20
    batch = jax.device_put(BATCH, NamedSharding(mesh, P("data"))) if places else BATCH
    once, first = step(state, batch)
    np.testing.assert_allclose(infos.loss[0], first.loss, rtol=1e-6)
    twice, _ = step(once, batch)
    np.testing.assert_allclose(looped.params["w"], twice.params["w"], rtol=1e-5, atol=1e-6)


def test_a_budget_of_a_split_state_needs_the_split():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AUTO,))
    specs = {"w": P("fsdp"), "b": P(None, "fsdp")}
    state, step = start(optax.adam(0.1), mesh, specs, via="jit", memory_budget="1MiB")
    with pytest.raises(ValueError, match="Call step.lower"):
        in_a_loop(step, state)
    step.lower(state, BATCH)
    plan = step.plan
    looped, _ = in_a_loop(step, state)
    assert step.plan is plan
    assert specs_of(looped) == specs_of(state)


def test_a_plan_is_made_once_for_traced_and_closed_over_batches():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AUTO,))
    specs = {"w": P("fsdp"), "b": P(None, "fsdp")}
    state, step = start(optax.adam(0.1), mesh, specs, via="jit", memory_budget="1MiB")
    wanted, _ = step(state, BATCH)
    plan = step.plan
    closed, _ = jax.jit(lambda state: step(state, BATCH))(state)
    traced, _ = jax.jit(step)(state, BATCH)
    assert step.plan is plan
    for found in (closed, traced):
        np.testing.assert_allclose(found.params["w"], wanted.params["w"], rtol=1e-5, atol=1e-6)


def test_a_traced_state_of_two_ways_to_split_is_refused():
    mesh = jax.make_mesh((2, 4), ("data", "tp"), axis_types=(AUTO, AUTO))
    state, step = start(optax.adam(0.1), mesh, SPECS)
    other, _ = start(optax.adam(0.1), mesh, {"w": P("tp"), "b": P()})
    step(state, BATCH)
    traced, _ = jax.jit(step)(state, BATCH)
    assert specs_of(traced) == specs_of(state)
    step(other, BATCH)
    with pytest.raises(ValueError, match="after 2 ways to split one"):
        jax.jit(lambda state: step(state, BATCH))(state)


@pytest.mark.parametrize("via", ["shard_map", "jit"])
@pytest.mark.parametrize("kinds", [(AUTO, EXPLICIT), (EXPLICIT, AUTO)])
def test_axes_of_two_types(via, kinds):
    mesh = jax.make_mesh((2, 4), ("data", "tp"), axis_types=kinds)
    state, step = start(optax.adam(0.1), mesh, SPECS, via=via)
    wanted, _ = step(state, BATCH)
    traced, _ = jax.jit(step)(state, BATCH)
    np.testing.assert_allclose(traced.params["w"], wanted.params["w"], rtol=1e-5, atol=1e-6)
    assert specs_of(traced.params) == specs_of(wanted.params)
