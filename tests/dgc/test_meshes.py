"""Compression over one axis of a larger mesh: shards choose, send and keep what is theirs."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jrc

AXES = ("replica", "fsdp", "model")
SHAPES = {"w": (16, 8), "o": (8, 8), "s": (64,), "b": (4,)}
SPECS = {
    "w": P("fsdp", "model"),
    "o": P(None, ("fsdp", "model")),
    "s": P(),
    "b": P("fsdp"),
}
SPARSITY = 0.75
STEPS = 3
WAYS = ("automatic", "explicit", "manual")
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
CASES = [
    ("automatic", False),
    ("explicit", True),
    ("manual", False),
    slow("automatic", True),
    slow("explicit", False),
    slow("manual", True),
]
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
    return functools.cache(run)


@pytest.mark.slow(after=1, every=True)
@pytest.mark.parametrize(("way", "check_vma"), CASES)
def test_every_shard_follows_the_formulas(results, way, check_vma):
    params, state = results(way, check_vma)
    for name in SHAPES:
        own = shards(np.asarray(params[name])[None], name)
        for number, (param, v) in enumerate(in_numpy(name)):
            np.testing.assert_allclose(own[number][0], param, rtol=1e-5, atol=1e-6)
            if name != "b":
                kept = shards(np.asarray(state.v[name]), name)[number]
                np.testing.assert_allclose(kept, v, rtol=1e-5, atol=1e-6)


def test_state_lies_as_the_parameters_do(results):
    for way, check_vma in CASES[:3]:
        params, state = results(way, check_vma)
        assert params["w"].addressable_shards[0].data.shape == (8, 4)
        for field in (state.u, state.v):
            local = {
                name: rows.addressable_shards[0].data.shape
                for name, rows in field.items()
                if name != "b"
            }
            assert local == {"w": (1, 8, 4), "o": (1, 8, 2), "s": (1, 64)}


def test_what_crosses_the_replica_axis_is_a_quarter():
    """From the optimised program: one device sends its own shard's entries, nothing is gathered."""
    mesh, name = mesh_of("automatic"), "w"
    shape, spec = (64, 64), P("fsdp", "model")
    tx = jrc.scale_by_dgc(0.9, sparsity=15 / 16, min_size=32, axis_name="replica")

    def body(params, state, grads):
        updates, state = tx.update(local(grads), state, params, param_specs={name: spec})
        return jax.tree.map(jnp.add, params, updates), state

    params = {name: np.zeros(shape, np.float32)}
    state = tx.init(params)
    states = jrc.dgc_specs(state, "replica")
    fn = jax.shard_map(
        body,
        mesh=mesh,
        axis_names={"replica"},
        in_specs=(P(), states, P("replica")),
        out_specs=(P(), states),
    )
    rows = jax.ShapeDtypeStruct((2, *shape), jnp.float32)
    whole = jrc.dgc_specs(state, "replica", {name: spec})
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(
            (2, *x.shape[1:]) if s else x.shape, x.dtype, sharding=NamedSharding(mesh, s)
        ),
        state,
        whole,
    )
    given = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    rows = jax.ShapeDtypeStruct(
        (2, *shape), jnp.float32, sharding=NamedSharding(mesh, P("replica", *spec))
    )
    compiled = (
        jax.jit(fn, donate_argnums=(0, 1)).lower({name: given}, state, {name: rows}).compile()
    )
    found = collectives(compiled.as_text())
    # The guard's scalar, and one gather of 64 entries of 8 bytes from each of two replicas: a whole
    # replica sends 4096 / 16 of them.
    assert sorted(size for _, size in found) == [4, 2 * 64 * 8], found
    assert compiled.memory_analysis().argument_size_in_bytes < 4 * (64 * 64 * 4) + 100


def collectives(text):
    """The collectives of a compiled program: kind, and bytes of the result."""
    found = re.findall(
        r"= (\w+)\[([\d,]*)\]\S* "
        r"(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)\(",
        text,
    )
    size = {"f32": 4, "u32": 4, "s32": 4, "pred": 1}
    return [
        (kind, size[dtype] * int(np.prod([int(n) for n in shape.split(",") if n])))
        for dtype, shape, kind in found
    ]


@pytest.mark.parametrize(("way", "check_vma"), CASES)
def test_a_bad_gradient_in_one_shard_skips_the_step_everywhere(way, check_vma):
    mesh = mesh_of(way)
    params = {k: np.zeros(shape, np.float32) for k, shape in SHAPES.items()}
    step = step_of(way, tx, mesh, check_vma, params)
    rows = {k: P("replica", *spec) for k, spec in SPECS.items()}
    bad = gradients(0)
    bad["w"][1, 15, 7] = np.nan
    before = placed(params, mesh, SPECS)
    after, state = step(before, state_of(tx, params, mesh), placed(bad, mesh, rows))
    assert int(state.step) == 0 and int(state.skipped) == 1
    assert not any(np.any(np.asarray(x)) for x in jax.tree.leaves((after, state.u, state.v)))


@pytest.mark.parametrize(
    ("kind", "eager"),
    [(AxisType.Auto, False), (AxisType.Explicit, False), slow(AxisType.Explicit, True)],
)
def test_one_replica_with_explicit_axes(kind, eager):
    mesh = jax.make_mesh((4, 2), ("fsdp", "model"), axis_types=(kind,) * 2)
    specs = {"w": P("fsdp", "model"), "b": P()}
    alone = jrc.scale_by_dgc(0.9, sparsity=0.75, min_size=16)
    params = placed({"w": np.ones((16, 8), np.float32), "b": np.ones(4, np.float32)}, mesh, specs)
    state = alone.init(params)
    assert state.u["w"].sharding.spec == P(None, "fsdp", "model")
    grads = placed(
        {"w": np.arange(128.0, dtype=np.float32).reshape(16, 8), "b": np.ones(4, np.float32)},
        mesh,
        specs,
    )
    given = {} if kind == AxisType.Explicit else {"param_specs": specs}
    update = lambda g, s, p: alone.update(g, s, p, **given)  # noqa: E731
    with jax.set_mesh(mesh) if kind == AxisType.Auto else contextlib.nullcontext():
        updates, state = (update if eager else jax.jit(update))(grads, state, params)
    # Each of the eight shards sends four of its sixteen entries.
    sent = np.asarray(updates["w"]).reshape(4, 4, 2, 4).swapaxes(1, 2).reshape(8, 16) != 0
    assert sent.sum(1).tolist() == [4] * 8


@pytest.mark.slow
def test_choices_over_several_leaves_are_equal_where_leaves_are():
    chosen = jrc.scale_by_dgc(
        0.9, sparsity=SPARSITY, min_size=32, axis_name="replica", selector="global"
    )
    for way in ("automatic", "manual"):
        params, _ = run(way, False, chosen, steps=1)
        for leaf in params.values():
            pieces = {}
            for shard in leaf.addressable_shards:
                np.testing.assert_array_equal(
                    pieces.setdefault(str(shard.index), shard.data), shard.data
                )


@pytest.mark.slow
def test_clipping_takes_the_norm_of_the_whole_tensor():
    clipped = jrc.scale_by_dgc(
        0.9, sparsity=0.0, min_size=32, axis_name="replica", local_grad_clip_norm=1.0
    )
    results = [run(way, vma, clipped, steps=1)[0] for way in WAYS for vma in (False, True)]
    norms = np.linalg.norm(gradients(0)["w"].reshape(2, -1), axis=1)
    want = (gradients(0)["w"] * (np.sqrt(2) / norms)[:, None, None]).mean(0)
    for params in results:
        np.testing.assert_allclose(params["w"], want, rtol=1e-5, atol=1e-6)


def refused(message, way="automatic", check_vma=False, tx=tx, specs=SPECS):
    mesh = mesh_of(way)
    params = {k: np.zeros(shape, np.float32) for k, shape in SHAPES.items()}
    states = jrc.dgc_specs(jax.eval_shape(tx.init, params), "replica")
    names = set(AXES) if way == "manual" else {"replica"}

    def body(params, state, grads):
        return tx.update(local(grads), state, params, param_specs=specs)

    fn = jax.shard_map(
        body,
        mesh=mesh,
        axis_names=names,
        in_specs=(P(), states, P("replica")),
        out_specs=(P(), states),
        check_vma=check_vma,
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(fn, params, state_of(tx, params, mesh), gradients(0))


def test_splits_that_are_not_known_are_asked_for():
    refused("param_specs must be given where mesh axes besides axis_name are auto", specs=None)
    other = jrc.scale_by_dgc(min_size=32, axis_name="replica", selector="global")
    refused("param_specs must be given for selector=", "manual", tx=other, specs=None)
    clip = jrc.scale_by_dgc(min_size=32, axis_name="replica", local_grad_clip_norm=1.0)
    refused("param_specs must be given for local_grad_clip_norm", "manual", tx=clip, specs=None)
    refused("param_specs must have the structure of the parameters", specs={"w": P()})


def test_parameters_split_over_the_compressed_axis_are_refused():
    message = "params must be whole on every replica of the compressed axis 'replica', got 'w'"
    refused(message, specs=SPECS | {"w": P("replica")})
    with pytest.raises(ValueError, match="hybrid sharding"):
        jrc.dgc_specs(tx.init({"w": jnp.ones(64)}), "replica", {"w": P("replica")})


def test_resharded_from_two_by_four_to_four_by_two():
    old = jax.make_mesh((2, 4), ("replica", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    new = jax.make_mesh((4, 2), ("replica", "fsdp"), axis_types=(AxisType.Explicit,) * 2)
    params = placed({"w": np.ones((16, 8), np.float32)}, old, {"w": P("fsdp")})
    optimizer = jrc.dgc_momentum(0.1, 0.9, 0, min_size=8, axis_name="replica")
    state = jrc.init_state(params, optimizer, jax.random.key(0), mesh=old, axis_name="replica")
    rows = np.random.default_rng(0).integers(-9, 9, (2, 16, 8)).astype(np.float32)
    own = state.opt_state[0]
    v = {"w": jax.device_put(rows, own.v["w"].sharding)}
    state = state._replace(opt_state=(own._replace(v=v), *state.opt_state[1:]))
    after = jrc.reshard_dgc(state, 4, mesh=new, axis_name="replica")
    kept = after.opt_state[0].v["w"]
    assert kept.sharding == NamedSharding(new, P("replica", "fsdp"))
    assert after.params["w"].sharding == NamedSharding(new, P("fsdp"))
    np.testing.assert_array_equal(kept, np.repeat(rows, 2, 0))
    np.testing.assert_array_equal(np.asarray(kept).mean(0), rows.mean(0))
