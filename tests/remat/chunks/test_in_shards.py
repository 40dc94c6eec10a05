"""Regions in chunks of programs that XLA splits over devices: slices lie on one device each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jrc
from jrc._jaxpr import Program, SplitValues, inline_all, inlined_program, without_mesh_axes
from jrc.remat._chunks.regions_within import regions_within
from jrc.remat._chunks.rewrite import in_chunks
from jrc.remat._planner.costs.sharding import split_values

SIZES = {"data": 4, "model": 2}
BATCH, LENGTH, WIDTH, WORDS = 32, 16, 24, 512
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(BATCH, LENGTH, WIDTH)).astype(np.float32)
LABELS = DRAW.integers(0, WORDS, (BATCH, LENGTH))
PARAMS = {
    "a": DRAW.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 5,
    "head": DRAW.normal(size=(WIDTH, WORDS)).astype(np.float32) / 5,
}
DATA = {
    "rows": (P("data"), {"data"}),
    "rows and places": (P("data", "model"), {"data", "model"}),
    "rows of both": (P(("data", "model")), {"data", "model"}),
}
WEIGHTS = {
    "copied": {"a": P(), "head": P()},
    "fsdp": {"a": P("data"), "head": P("data")},
    "tensor": {"a": P(), "head": P(None, "model")},
    "fsdp and tensor": {"a": P("data"), "head": P("data", "model")},
}


def mesh_of(kind):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)


def put(tree, specs, mesh):
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs)


def is_label(labels, words):
    return labels[..., None] == jnp.arange(words)[None, None]


def head(params, x, labels):
    """Cross-entropy with a term of the partition function, and a scale outside of the region."""
    logits = jnp.tanh(x @ params["a"]) @ params["head"]
    norm = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.sum(
        jnp.where(labels[..., None] == jnp.arange(WORDS)[None, None], logits, 0), axis=-1
    )
    return 3 * jnp.mean(norm - picked + 1e-2 * norm**2)


def mlp(params, x, labels):
    """Its wide middle is joined, and not summed."""
    y = x + jnp.square(x @ params["head"]) @ params["head"].T
    return jnp.mean((y @ params["a"]) ** 2)


def gathered(fn):
    """The function on explicit axes: what FSDP splits is gathered by hand."""

    def run(params, x, labels):
        kept = lambda spec: P(*(name if name == "model" else None for name in spec))  # noqa: E731
        specs = jax.tree.map(lambda w: kept(jax.typeof(w).sharding.spec), params)
        return fn(jax.tree.map(jax.sharding.reshard, params, specs), x, labels)

    return run


def chunked_in_shards(fn, args, narrow, most_bytes):
    """The function in chunks of what each device has, and its regions."""
    flat, tree = jax.tree.flatten(args)
    jaxpr = jax.make_jaxpr(lambda *flat: [fn(*jax.tree.unflatten(tree, flat))])(*flat)
    program = inlined_program(jaxpr)
    split = split_values(program, flat, range(len(jax.tree.leaves(args[0]))))
    regions = regions_within(program, narrow, split=split)
    chunks = [found for each in regions if (found := each.chunks(most_bytes))]
    run = in_chunks(program, chunks)
    return (lambda *args: run(*jax.tree.leaves(args))[0]), chunks


def collectives_of(fn, args):
    """The collectives of value and gradients, as jrc.explain reads them."""
    return jrc.explain(fn, *args).collectives


@pytest.mark.slow(after=1, every=True)
@pytest.mark.exhaustive(after=3)
@pytest.mark.parametrize(
    ("fn", "kind", "weights"),
    [
        (head, AxisType.Auto, "fsdp"),
        (head, AxisType.Auto, "fsdp and tensor"),
        (head, AxisType.Explicit, "fsdp and tensor"),
        (mlp, AxisType.Auto, "fsdp"),
        (head, AxisType.Auto, "tensor"),
        (head, AxisType.Explicit, "fsdp"),
        (mlp, AxisType.Auto, "fsdp and tensor"),
        (mlp, AxisType.Auto, "copied"),
        (head, AxisType.Auto, "copied"),
        (head, AxisType.Explicit, "copied"),
        (head, AxisType.Explicit, "tensor"),
        (mlp, AxisType.Auto, "tensor"),
    ],
)
def test_weights_are_gathered_and_their_gradients_summed_once(fn, kind, weights):
    """Values and gradients are those of the whole, and no weight's collective is in the loop."""
    if kind is AxisType.Explicit:
        fn = gathered(fn)
    mesh = mesh_of(kind)
    args = (put(PARAMS, WEIGHTS[weights], mesh), *put((X, LABELS), (P("data"),) * 2, mesh))
    with jax.set_mesh(mesh):
        run, chunks = chunked_in_shards(fn, args, 2**17, 2**17)
        assert chunks and all(("data", 4) in [(s.names[0], s.parts) for s in x.shards]
                              for x in chunks)  # fmt: skip
        wanted, found = (jax.jit(jax.value_and_grad(f))(*args) for f in (fn, run))
        plain, lean = collectives_of(fn, args), collectives_of(run, args)
    for a, b in zip(*map(jax.tree.leaves, (wanted, found)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * np.max(np.abs(a)), rtol=0)
    over_data = lambda found: [each for each in found if "model" not in each.axes]  # noqa: E731
    count = lambda found: sum(each.count * len(each.arrays) for each in over_data(found))  # noqa: E731
    assert count(lean) <= count(plain)
    assert not any(each.kind.startswith(("all-to-all", "collective-permute")) for each in lean)
    sent = lambda found: sum(each.sent for each in over_data(found))  # noqa: E731
    assert sent(lean) <= sent(plain)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_random_masks_are_drawn_where_the_data_are(kind):
    """Each device draws those of its data, chunk by chunk."""

    def dropped(w, x, key):
        wide = jnp.tanh(x @ w)
        wide = jnp.where(jax.random.bernoulli(key, 0.5, wide.shape), wide, 0)
        return jnp.mean((wide @ w.T) ** 2)

    mesh = jax.make_mesh((4,), ("data",), (kind,), devices=jax.devices()[:4])
    arrays = (DRAW.normal(size=(16, 1024)) / 5, DRAW.normal(size=(2048, 16)))
    args = put(tuple(x.astype(np.float32) for x in arrays), (P(), P("data")), mesh)
    with jax.set_mesh(mesh):
        plan = jrc.plan(dropped, *args, jax.random.key(1), budget=1_500_000)
        fns = dropped, plan.apply(dropped)
        wanted, found = (jax.jit(jax.grad(f))(*args, jax.random.key(1)) for f in fns)
    assert plan.chunks[0].shards[0].names == ("data",)
    np.testing.assert_allclose(found, wanted, atol=2e-6 * np.max(np.abs(wanted)), rtol=0)


def test_one_hot_labels_are_made_in_chunks_on_explicit_axes():
    """The part of the program that the parts run has no mesh axes, and would fail in front."""
    words = 1024

    def loss(head, x, labels):
        logits = x @ head
        picked = jnp.sum(logits * jax.nn.one_hot(labels, words), -1)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    mesh = jax.make_mesh((4,), ("data",), (AxisType.Explicit,), devices=jax.devices()[:4])
    args = put(
        (
            DRAW.normal(size=(16, words)).astype(np.float32),
            DRAW.normal(size=(2048, 16)).astype(np.float32),
            DRAW.integers(0, words, 2048).astype(np.int32),
        ),
        (P(), P("data"), P("data")),
        mesh,
    )
    with jax.set_mesh(mesh):
        plan = jrc.plan(loss, *args, argnums=(0, 1), budget=1_000_000)
        run = [jax.jit(jax.grad(f, (0, 1))) for f in (loss, plan.apply(loss))]
        wanted, found = (each(*args) for each in run)
    assert plan.chunks and plan.verified.peak_bytes <= 1_000_000
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max())


@pytest.mark.slow(after=1, every=True)
@pytest.mark.exhaustive(after=3)
@pytest.mark.parametrize("data", DATA)
def test_every_way_to_split_the_data(data):
    spec, wanted_names = DATA[data]
    mesh = mesh_of(AxisType.Auto)
    weights = jax.tree.map(lambda _: P(), PARAMS)
    args = (put(PARAMS, weights, mesh), *put((X, LABELS), (spec,) * 2, mesh))
    run, (chunks,) = chunked_in_shards(head, args, 2**17, 2**17)
    assert {name for each in chunks.shards for name in each.names} == wanted_names
    wanted, found = (jax.jit(jax.value_and_grad(f))(*args) for f in (head, run))
    for a, b in zip(*map(jax.tree.leaves, (wanted, found)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * np.max(np.abs(a)), rtol=0)
    assert all(each.kind == "all-reduce" for each in collectives_of(run, args))


def layers(params, x):
    """Layers in a scan: attention along places, and a constraint on what they carry."""

    def layer(x, w):
        x = jax.lax.with_sharding_constraint(x, P("data", None, None))
        scores = jax.nn.softmax(jnp.einsum("bld,bmd->blm", x @ w, x) / 5, axis=-1)
        x = x + jnp.einsum("blm,bmd->bld", scores, x)
        return x + jnp.tanh(jnp.tile(x @ w, 8)) @ jnp.tile(w, (8, 1)), None

    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [P(None, "data"), P(None, None, "model"), P()])
def test_layers_in_a_loop_run_in_chunks_of_what_a_device_has(spec):
    mesh = mesh_of(AxisType.Auto)
    weights = DRAW.normal(size=(3, WIDTH, WIDTH)).astype(np.float32) / 50
    args = put((weights, X), (spec, P("data")), mesh)
    with jax.set_mesh(mesh):
        run, chunks = chunked_in_shards(layers, args, 2**16, 2**16)
        assert any(each.path for each in chunks) and all(each.shards for each in chunks)
        wanted, found = (jax.jit(jax.value_and_grad(f))(*args) for f in (layers, run))
        lean = collectives_of(run, args)
    for a, b in zip(*map(jax.tree.leaves, (wanted, found)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * np.max(np.abs(a)), rtol=0)
    assert not any(each.kind == "all-to-all" for each in lean)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_budget_on_a_mesh_is_met_in_chunks(kind):
    """The logits of a device are 8 MiB; all its temporaries fit 4 MiB."""
    mesh, words = mesh_of(kind), 8192
    fit = lambda shape: DRAW.normal(size=shape).astype(np.float32) / 5  # noqa: E731
    params = {"a": fit((WIDTH, WIDTH)), "head": fit((WIDTH, words))}
    data = fit((4 * BATCH, LENGTH, WIDTH)), DRAW.integers(0, words, (4 * BATCH, LENGTH))

    def loss(params, x, labels):
        logits = jax.nn.log_softmax(jnp.tanh(x @ params["a"]) @ params["head"])
        return -jnp.mean(
            jnp.sum(jnp.where(labels[..., None] == jnp.arange(words)[None, None], logits, 0), -1)
        )

    weights = {"a": P(), "head": P(None, "model")}
    args = (put(params, weights, mesh), *put(data, (P("data"),) * 2, mesh))
    with jax.set_mesh(mesh):
        plan = jrc.plan(loss, *args, budget="6MiB")
        wanted, found = (jax.jit(jax.value_and_grad(f))(*args) for f in (loss, plan.apply(loss)))
    assert plan.verified.peak_bytes <= 6 * 2**20 and plan.verified.flops_ratio < 1.05
    assert [each.names for chunks in plan.chunks for each in chunks.shards] == [("data",)]
    assert jrc.Plan.from_json(plan.to_json()) == plan
    for a, b in zip(*map(jax.tree.leaves, (wanted, found)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * np.max(np.abs(a)), rtol=0)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_chunks_are_of_the_data_where_only_a_weight_in_front_is_differentiated(kind):
    """Whole points without a gradient would be cheaper to cut; but all devices hold all of them."""
    mesh = mesh_of(kind)
    draw = lambda *shape: DRAW.normal(size=shape).astype(np.float32)  # noqa: E731
    args = put((draw(4, 4), draw(1024, 4), draw(512, 4)), (P(), P("data"), P()), mesh)

    def loss(w, x, y):
        between = jnp.abs(jnp.tanh(x @ w)[:, None] - y[None])
        return jnp.mean(jnp.exp(-jnp.sum(between, axis=-1)))

    with jax.set_mesh(mesh):
        plan = jrc.plan(loss, *args, budget="1MiB")
        wanted, found = (jax.jit(jax.value_and_grad(f))(*args) for f in (loss, plan.apply(loss)))
    assert [each.names for chunks in plan.chunks for each in chunks.shards] == [("data",)]
    for a, b in zip(*map(jax.tree.leaves, (wanted, found)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * np.max(np.abs(a)), rtol=0)


def test_data_split_dimensions_before_parameters_do():
    """As with FSDP: what a table's rows are split over, the examples are split over too."""

    def fn(table, x):
        y = table[x] @ jnp.ones((6, 8))
        steps = jax.lax.scan(lambda c, row: (c + row, c * row), jnp.zeros((8, 8)), y)
        return jnp.tanh(y), steps

    jaxpr = inline_all(jax.make_jaxpr(fn)(jnp.ones((9, 6)), jnp.ones((5, 8), int)))
    program = Program(jaxpr)
    table, x = program.jaxpr.invars
    given = {table: (("model",), ("data",)), x: ((), ("data",))}
    split = SplitValues(program, given, [x], {"data": 2})
    out, carry, ys = program.jaxpr.outvars
    assert split.of(out) == split.of(ys) == ((), ("data",), ())
    assert split.of(carry) == (("data",), ())
    (loop,) = [eqn for eqn in program.eqns if eqn.primitive.name == "scan"]
    body = inlined_program(loop.params["jaxpr"])
    inside = split.inside(loop, body)
    assert [inside.of(v) for v in body.jaxpr.invars] == [(("data",), ())] * 2


def test_an_axis_of_the_mesh_is_left_out_of_a_program():
    mesh = jax.sharding.AbstractMesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def body(x, _):
        spec = P(("data", "model"), P.UNCONSTRAINED)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)), None

    jaxpr = jax.make_jaxpr(lambda x: jax.lax.scan(body, x, None, length=2)[0])(jnp.ones((4, 4)))
    part = without_mesh_axes(Program(jaxpr), ["data"])
    (loop,) = part.eqns
    (constraint,) = loop.params["jaxpr"].eqns
    assert constraint.params["sharding"].spec == P(("model",), P.UNCONSTRAINED)
    assert without_mesh_axes(part, []) is part


def test_rows_of_a_table_and_sums_of_messages_on_a_mesh():
    """What is read is gathered inside of the region; sums are scattered onto zeros."""
    mesh = mesh_of(AxisType.Auto)
    table, ids = DRAW.normal(size=(64, WIDTH)).astype(np.float32), DRAW.integers(0, 64, 4096)

    def messages(params, table, ids):
        sent = jnp.tanh(jnp.tanh(table[ids] @ params["a"]) @ params["head"])
        return jnp.mean(jax.ops.segment_sum(sent @ params["head"].T, ids // 2, 32) ** 2)

    weights = jax.tree.map(lambda _: P(), PARAMS)
    args = (put(PARAMS, weights, mesh), *put((table, ids), (P(), P("data")), mesh))
    run, chunks = chunked_in_shards(messages, args, 2**20, 2**20)
    assert chunks and all(each.shards for each in chunks)
    wanted, found = (jax.jit(jax.value_and_grad(f))(*args) for f in (messages, run))
    for a, b in zip(*map(jax.tree.leaves, (wanted, found)), strict=True):
        np.testing.assert_allclose(a, b, atol=4e-6 * np.max(np.abs(a)), rtol=0)


def test_what_is_the_same_in_all_slices_is_no_region():
    def loss(w, x):
        mask = jax.lax.broadcasted_iota(jnp.int32, (64, 2048), 0) % 3 == 0
        y = jnp.where(mask, jnp.tanh(x @ w), 0.1)
        return jnp.mean(jnp.cumsum(jnp.sort(y, axis=0), axis=1) ** 2)

    args = jnp.ones((8, 2048)) / 10, jnp.ones((64, 8))
    program = inlined_program(jax.make_jaxpr(loss)(*args))
    for narrow in (2**15, 2**16, 2**17, 2**18):
        chunks = [each.chunks(2**14) for each in regions_within(program, narrow)]
        (found,) = in_chunks(program, list(filter(None, chunks)))(*args)
        np.testing.assert_allclose(found, loss(*args), rtol=1e-6)


def layer(w, x):
    return jnp.tanh(x @ w)


def summed_over_devices(w):
    """A sum over devices, in a region of its own."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    part = jax.checkpoint(lambda a: jax.lax.psum(jnp.sin(a) @ a.T, "d"))
    return jax.shard_map(part, mesh=mesh, in_specs=P(None, "d"), out_specs=P())(w)


LAYERS = {
    "region": jax.checkpoint(layer),
    "scan": lambda w, x: jax.lax.scan(lambda x, _: (layer(w, x), None), x, length=2)[0],
    "cond": lambda w, x: jax.lax.cond(w[0, 0] > 0, lambda x: layer(w, x), jnp.sin, x),
}


@pytest.mark.slow(after=1, every=True)
@pytest.mark.parametrize("name", LAYERS)
def test_weights_inside_of_a_shard_map_are_summed_over_devices_once(name):
    """A construct casts the weights itself: the gradient of a chunk is that of all devices."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    w, x = jnp.eye(4) * 0.3, jnp.arange(64.0).reshape(16, 4) / 30
    loss = lambda w, x: jnp.mean(LAYERS[name](w, x) ** 2)  # noqa: E731

    def of_all(fn):
        run = lambda w, x: jax.lax.pmean(fn(w, x), "d")  # noqa: E731
        return jax.shard_map(run, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())

    lean = jrc.chunked(loss, in_axes=(None, 0), chunks=2)
    for argnums in ((0,), (0, 1)):
        found = jax.jit(jax.grad(of_all(lean), argnums))(w, x)
        wanted = jax.jit(jax.grad(of_all(loss), argnums))(w, x)
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_a_region_around_a_shard_map_with_a_region():
    w, x = jnp.eye(4) * 0.3, jnp.arange(64.0).reshape(16, 4) / 30
    block = jax.checkpoint(lambda w, x: layer(summed_over_devices(w), x))
    loss = lambda w, x: jnp.mean(block(w, x) ** 2)  # noqa: E731
    lean = jrc.chunked(loss, in_axes=(None, 0), chunks=2)
    found, wanted = (jax.jit(jax.grad(fn))(w, x) for fn in (lean, loss))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)
