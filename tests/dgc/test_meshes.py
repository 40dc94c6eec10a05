"""Compression over one axis of a larger mesh: shards choose, send and keep what is theirs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jrc
from jrc.dgc import dgc_states

AXES = ("replica", "fsdp", "model")
SHAPES = {"w": (16, 8), "h": (8, 16), "o": (8, 8), "s": (64,), "b": (4,)}
SPECS = {
    "w": P("fsdp", "model"),
    "h": P(None, ("fsdp", "model")),
    "o": P("model"),
    "s": P(),
    "b": P("fsdp"),
}
SPARSITY = 0.75
STEPS = 3
WAYS = ("automatic", "explicit", "manual")
tx = jrc.scale_by_dgc(0.9, sparsity=SPARSITY, min_size=32, axis_name="replica")


def mesh_of(way, shape=(2, 2, 2)):
    kind = AxisType.Explicit if way == "explicit" else AxisType.Auto
    return jax.make_mesh(shape, AXES, axis_types=(kind,) * 3)


def placed(tree, mesh, specs):
    return jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), tree, specs)


def gradients(step):
    """What each of two replicas computes: an array for each leaf with a row for each."""
    draw = np.random.default_rng(step)
    return {k: draw.normal(size=(2, *shape)).astype(np.float32) for k, shape in SHAPES.items()}


def local(tree):
    return jax.tree.map(lambda x: x[0], tree)


def step_of(way, tx, mesh, check_vma, params):
    """A jitted step of `(params, state, gradients with rows)` and its arguments' specs."""
    state = jax.eval_shape(tx.init, params)
    names = set(AXES) if way == "manual" else {"replica"}
    specs = SPECS if way == "manual" else None
    rows = {k: P("replica", *spec) for k, spec in SPECS.items()} if specs else P("replica")
    states = jrc.dgc_specs(state, "replica", specs)
    given = None if way == "explicit" or (way == "manual" and check_vma) else SPECS

    def body(params, state, grads):
        updates, state = tx.update(local(grads), state, params, param_specs=given)
        return jax.tree.map(jnp.add, params, updates), state

    fn = jax.shard_map(
        body,
        mesh=mesh,
        axis_names=names,
        in_specs=(specs or P(), states, rows),
        out_specs=(specs or P(), states),
        check_vma=check_vma,
    )
    return jax.jit(fn, donate_argnums=(0, 1))


def state_of(tx, params, mesh):
    state = tx.init(params)
    specs = jrc.dgc_specs(state, "replica", SPECS)
    rows = jax.tree.map(
        lambda x, s: jnp.tile(x, (2, *[1] * (x.ndim - 1))) if "replica" in s else x, state, specs
    )
    return placed(rows, mesh, specs)


def run(way, check_vma, tx=tx, steps=STEPS):
    mesh = mesh_of(way)
    params = {k: np.zeros(shape, np.float32) for k, shape in SHAPES.items()}
    step = step_of(way, tx, mesh, check_vma, params)
    state = state_of(tx, params, mesh)
    params = placed(params, mesh, SPECS)
    rows = {k: P("replica", *spec) for k, spec in SPECS.items()}
    for i in range(steps):
        params, state = step(params, state, placed(gradients(i), mesh, rows))
    return params, state


def shards(array, name):
    """Return the shards of a leaf, with the replicas' rows before."""
    spec = (*SPECS[name], None, None)[: array.ndim - 1]
    parts = [array]
    for at, entry in enumerate(spec):
        count = 2 ** len((entry,) if isinstance(entry, str) else entry or ())
        parts = [piece for part in parts for piece in np.split(part, count, at + 1)]
    return parts


def in_numpy(name):
    """Return parameters and v of each shard by the formulas, in float32."""
    out = []
    for number in range(len(shards(gradients(0)[name], name))):
        u = v = np.zeros((), np.float32)
        param = np.float32(0)
        for step in range(STEPS):
            g = shards(gradients(step)[name], name)[number]
            if g[0].size * len(shards(gradients(step)[name], name)) < 32:
                u = np.float32(0.9) * u + g.mean(0)
                param = param + u
                continue
            u = np.float32(0.9) * u + g
            v = v + u
            flat = np.abs(v.reshape(2, -1))
            k = max(1, int(flat.shape[1] * (1 - SPARSITY)))
            sent = flat >= np.sort(flat)[:, -k][:, None]
            sent = sent.reshape(v.shape)
            param = param + np.where(sent, v, 0).sum(0) / 2
            u, v = np.where(sent, 0, u), np.where(sent, 0, v)
        out.append((param, v))
    return out


@pytest.fixture(scope="module")
def results():
    return {(way, vma): run(way, vma) for way in WAYS for vma in (False, True)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("check_vma", [False, True])
def test_every_shard_follows_the_formulas(results, way, check_vma):
    params, state = results[way, check_vma]
    for name in SHAPES:
        own = shards(np.asarray(params[name])[None], name)
        for number, (param, v) in enumerate(in_numpy(name)):
            np.testing.assert_allclose(own[number][0], param, rtol=1e-5, atol=1e-6)
            if name != "b":
                kept = shards(np.asarray(state.v[name]), name)[number]
                np.testing.assert_allclose(kept, v, rtol=1e-5, atol=1e-6)


def test_state_lies_as_the_parameters_do(results):
    for params, state in results.values():
        for name in ("w", "h", "o", "s"):
            for rows in (state.u[name], state.v[name]):
                whole = {None: 1, "fsdp": 2, "model": 2}
                spec = SPECS[name]
                assert rows.shape == (2, *SHAPES[name])
                parts = np.prod([whole[a] for e in spec for a in (e if isinstance(e, tuple) else (e,))])
                assert rows.addressable_shards[0].data.size * 2 * parts == rows.size
        assert params["w"].addressable_shards[0].data.size * 4 == params["w"].size
