"""Users' meshes: FSDP, tensor parallelism, hybrid sharding, explicit axes; wrong ones speak."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jrc

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
SPECS = {"a": P("fsdp", "model"), "b": P(None, "model"), "c": P("model", "fsdp")}
ON_8 = {"a": P("fsdp"), "b": P(), "c": P(None, "fsdp")}
STEPS = 20


def loss_fn(params, batch, key):
    x, y = batch
    if jax.typeof(params["a"]).sharding.mesh.explicit_axes:
        params = jax.tree.map(lambda p: jax.sharding.reshard(p, P()), params)
    hidden = jnp.tanh(x @ params["a"] + params["b"])
    return jnp.mean((hidden @ params["c"] - y) ** 2)


def some_params():
    draw = np.random.default_rng(0)
    shapes = {"a": (16, 32), "b": (1, 32), "c": (32, 8)}
    return {k: 0.3 * draw.normal(size=s).astype(np.float32) for k, s in shapes.items()}


def batches(steps=STEPS):
    draw = np.random.default_rng(1)
    for _ in range(steps):
        yield tuple(draw.normal(size=(16, n)).astype(np.float32) for n in (16, 8))


def mesh_of(*sizes, kind=AUTO):
    names = {1: ("fsdp",), 2: ("fsdp", "model"), 3: ("replica", "fsdp", "model")}[len(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes))


def placed(tree, mesh, specs):
    return jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), tree, specs)


def start(tx, mesh, specs=SPECS, axis=None):
    params = placed(some_params(), mesh, specs)
    axis = axis or mesh.axis_names[0]
    return jrc.init_state(params, tx, jax.random.key(0), mesh=mesh, axis_name=axis)


@pytest.fixture(scope="module")
def alone():
    """Parameters after each step on one device."""
    tx = optax.adamw(1e-2)
    mesh = Mesh(jax.devices()[:1], ("data",))
    state = jrc.init_state(some_params(), tx, jax.random.key(0), mesh=mesh)
    step, path = jrc.make_train_step(loss_fn, tx, mesh=mesh, via="jit"), []
    for batch in batches():
        state, _ = step(state, batch)
        path.append(jax.tree.map(np.asarray, state.params))
    return path


def shardings(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


@pytest.mark.slow(after=1, every=True)
@pytest.mark.exhaustive(after=3)
@pytest.mark.parametrize(
    ("sizes", "kind", "via", "options"),
    [
        ((8,), AUTO, "jit", {}),
        ((4, 2), AUTO, "jit", {"accumulate": 2}),
        ((4, 2), EXPLICIT, "jit", {}),
        ((2, 2, 2), AUTO, "shard_map", {"accumulate": 2}),
        slow((8,), EXPLICIT, "jit", {"accumulate": 2}),
        slow((4, 2), AUTO, "jit", {"memory_budget": 0.5}),
        slow((4, 2), EXPLICIT, "jit", {"memory_budget": 0.5}),
        slow((2, 2, 2), AUTO, "jit", {}),
        slow((2, 2, 2), EXPLICIT, "jit", {"accumulate": 2}),
        slow((2, 2, 2), EXPLICIT, "shard_map", {"accumulate": 2, "memory_budget": 10**9}),
        slow((2, 2, 2), AUTO, "shard_map", {"memory_budget": 0.5}),
    ],
)
def test_training_is_that_of_one_device(alone, sizes, kind, via, options):
    mesh, tx = mesh_of(*sizes, kind=kind), optax.adamw(1e-2)
    specs = ON_8 if len(sizes) == 1 else SPECS
    axis = mesh.axis_names[0]
    state = start(tx, mesh, specs)
    before = shardings(state)
    assert before.params["a"] == NamedSharding(mesh, specs["a"])
    assert before.opt_state[0].mu == before.opt_state[0].nu == before.params
    step = jrc.make_train_step(loss_fn, tx, mesh=mesh, axis_name=axis, via=via, **options)
    rows = P(("replica", "fsdp")) if len(sizes) == 3 else P("fsdp")
    for batch, want in zip(batches(), alone, strict=True):
        state, info = step(state, placed(batch, mesh, (rows, rows)))
        for name, leaf in state.params.items():
            np.testing.assert_allclose(leaf, want[name], rtol=1e-5, atol=1e-5)
    same = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), state, before)
    assert jax.tree.all(same) and float(info.loss) > 0


@pytest.mark.slow
def test_saved_on_one_mesh_and_restored_on_another(tmp_path, alone):
    tx = optax.adamw(1e-2)
    first, then = mesh_of(4, 2), mesh_of(2, 4, kind=EXPLICIT)
    state = start(tx, first)
    step = jrc.make_train_step(loss_fn, tx, mesh=first, axis_name="fsdp", via="jit")
    some = list(batches(4))
    for batch in some[:2]:
        state, _ = step(state, batch)
    jrc.save(tmp_path, state)
    like = start(tx, then)
    state = jrc.restore(tmp_path, like)
    assert shardings(state) == shardings(like)
    step = jrc.make_train_step(loss_fn, tx, mesh=then, axis_name="fsdp", via="jit")
    for batch in some[2:]:
        state, _ = step(state, batch)
    for name, leaf in state.params.items():
        np.testing.assert_allclose(leaf, alone[3][name], rtol=1e-5, atol=1e-5)


def test_a_lookup_at_which_the_partitioner_may_abort_is_told_before():
    """XLA would end the process; the warning, here an error, comes before it compiles."""
    mesh, rows = mesh_of(2, 2, 2), P(("replica", "fsdp"))

    def loss(params, batch, key):
        return jnp.mean((params["table"][batch] @ params["w"]) ** 2)

    shapes = {"table": (64, 16), "w": (16, 8)}
    specs = {"table": P(None, "fsdp"), "w": P("fsdp", "model")}
    params = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    on = {"mesh": mesh, "axis_name": "replica"}
    state = jrc.init_state(placed(params, mesh, specs), optax.sgd(0.1), jax.random.key(0), **on)
    step = jrc.make_train_step(loss, optax.sgd(0.1), **on)
    message = (
        "jrc.make_train_step: XLA's partitioner is known to abort the process at a lookup in an "
        "array that is split inside of a replica as params 'table' is, P(None, 'fsdp'), by indices "
        "that are split over 'fsdp' of 'fsdp', 'model'. Split it along its width over all of them, "
        "P(None, ('fsdp', 'model')), or use via='jit'."
    )
    with pytest.raises(UserWarning, match=re.escape(message)):
        step(state, placed(np.zeros((16, 4), np.int32), mesh, rows))


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("kind", [AUTO, slow(EXPLICIT)])
def test_compression_between_replicas_that_are_split(kind):
    mesh = mesh_of(2, 2, 2, kind=kind)
    tx = jrc.dgc_momentum(0.05, 0.9, 0, sparsity=0.9, axis_name="replica", min_size=100)
    state = start(tx, mesh, axis="replica")
    step = jrc.make_train_step(loss_fn, tx, mesh=mesh, axis_name="replica")
    rows = P(("replica", "fsdp"))
    losses = []
    for batch in batches(6):
        state, info = step(state, placed(batch, mesh, (rows, rows)))
        losses.append(float(info.loss))
    own = state.opt_state[0]
    for name in ("a", "c"):
        assert own.v[name].sharding == NamedSharding(mesh, P("replica", *SPECS[name]))
        assert own.v[name].shape == (2, *some_params()[name].shape)
    # 128 entries of a and 64 of c on each device, and 16 of b in float32 on the dense path.
    sent = 8 * (int(128 * 0.1) + int(64 * 0.1)) + 4 * 16
    assert float(info.bytes_sent) == sent
    assert not bool(info.skipped) and np.isfinite(losses).all()
    bad = tuple(x * np.nan for x in placed(next(batches(1)), mesh, (rows, rows)))
    after, info = step(state, bad)
    assert bool(info.skipped) and np.isfinite(after.params["a"]).all()


@pytest.mark.slow
def test_a_chain_with_compression_gets_the_specs():
    mesh = mesh_of(2, 2, 2)
    dgc = jrc.scale_by_dgc(0.0, sparsity=0.0, axis_name="replica", min_size=100)
    tx = optax.chain(optax.masked(dgc, {"a": True, "b": False, "c": True}), optax.adam(1e-2))
    state = start(tx, mesh, axis="replica")
    step = jrc.make_train_step(loss_fn, tx, mesh=mesh, axis_name="replica")
    one = Mesh(jax.devices()[:1], ("data",))
    plain = optax.adam(1e-2)
    other = jrc.init_state(some_params(), plain, jax.random.key(0), mesh=one)
    single = jrc.make_train_step(loss_fn, plain, mesh=one, via="jit")
    for batch in batches(3):
        state, _ = step(state, batch)
        other, _ = single(other, batch)
    for name, leaf in state.params.items():
        np.testing.assert_allclose(leaf, other.params[name], rtol=1e-5, atol=1e-5)


def test_factored_states_stay_whole_and_rows_are_split():
    mesh = mesh_of(4, 2)
    adafactor = optax.adafactor(1e-2, min_dim_size_to_factor=8)
    state = start(adafactor, mesh)
    assert all(isinstance(x.sharding, NamedSharding) for x in jax.tree.leaves(state))
    lbfgs = optax.scale_by_lbfgs(memory_size=3)
    memory = start(lbfgs, mesh).opt_state.diff_params_memory["a"]
    assert memory.sharding.spec == P(None, "fsdp", "model") and memory.shape == (3, 16, 32)


def speaks(message, *, mesh, specs=SPECS, tx=None, batch=None, state_mesh=None, **options):
    tx = tx or optax.sgd(0.1)
    axis = options.setdefault("axis_name", mesh.axis_names[0])
    with pytest.raises(ValueError, match=re.escape(message)):
        state = start(tx, state_mesh or mesh, specs, axis)
        step = jrc.make_train_step(loss_fn, tx, mesh=mesh, **options)
        step(state, next(batches(1)) if batch is None else batch)


WHOLE = {"a": P(), "b": P(), "c": P()}


def test_wrong_meshes_speak():
    eight, four_two = mesh_of(8), mesh_of(4, 2)
    speaks("split something, got 'model', over which", mesh=four_two, specs=WHOLE)
    speaks("params must be whole on every replica of axis_name with", mesh=eight, specs=ON_8)
    ten = tuple(x[:12] for x in next(batches(1)))
    speaks("batch must be a multiple of replicas", mesh=eight, specs=ON_8, via="jit", batch=ten)
    three = mesh_of(2, 2, 2)
    six = placed(tuple(x[:12] for x in next(batches(1))), three, (P(("replica", "fsdp")),) * 2)
    speaks("split over ('replica', 'fsdp') * accumulate = 8", mesh=three, batch=six, accumulate=2)
    compression = jrc.dgc_momentum(0.1, 0.9, 0, min_size=1, axis_name="fsdp")
    speaks("params must be whole on every replica of the", mesh=eight, specs=ON_8, tx=compression)
    tx = jrc.dgc_momentum(0.1, 0.9, 0, min_size=1)
    speaks("tx must not compress with via='jit'", mesh=eight, specs=WHOLE, tx=tx, via="jit")
    other = placed(next(batches(1)), mesh_of(2, 4), (P("fsdp"),) * 2)
    speaks("split over the mesh of the run, Mesh(fsdp: 4, model: 2)", mesh=four_two, batch=other)
    explicit = mesh_of(4, 2, kind=EXPLICIT)
    speaks("state must lie on the mesh of the step", mesh=four_two, state_mesh=explicit, via="jit")


def test_parameters_on_another_mesh_are_refused():
    params = placed(some_params(), mesh_of(4, 2), SPECS)
    with pytest.raises(ValueError, match=re.escape("arrays must be split over the mesh of the")):
        jrc.init_state(params, optax.sgd(0.1), jax.random.key(0))


def test_an_axis_that_only_the_loss_function_splits_is_used():
    mesh = mesh_of(4, 2)

    traced = []

    def loss(params, batch, key):
        traced.append(1)
        hidden = jnp.tanh(batch[0] @ params["a"] + params["b"])
        hidden = jax.lax.with_sharding_constraint(hidden, P("fsdp", "model"))
        return jnp.mean((hidden @ params["c"] - batch[1]) ** 2)

    tx = optax.sgd(0.1)
    state = start(tx, mesh, WHOLE)
    step = jrc.make_train_step(loss, tx, mesh=mesh, axis_name="fsdp", via="jit")
    _, info = step(state, next(batches(1)))
    assert np.isfinite(info.loss)
    # The program that is looked into is the one that runs.
    assert len(traced) == 1


def test_the_name_of_an_axis_elsewhere_in_the_program_splits_nothing():
    def loss(params, batch, key):
        with set_xla_metadata(part="model"):
            hidden = jnp.tanh(batch[0] @ params["a"] + params["b"])
        return jnp.mean((hidden @ params["c"] - batch[1]) ** 2)

    step = jrc.make_train_step(loss, optax.sgd(0.1), mesh=mesh_of(4, 2), axis_name="fsdp")
    state = jrc.init_state(
        some_params(), optax.sgd(0.1), jax.random.key(0), mesh=mesh_of(4, 2), axis_name="fsdp"
    )
    with pytest.raises(ValueError, match="split something, got 'model', over which"):
        step(state, next(batches(1)))


@pytest.mark.slow
def test_a_flax_nnx_model_with_its_partition_specs():
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            draw = nnx.initializers.lecun_normal()
            into = nnx.with_partitioning(draw, ("fsdp", "model"))
            back = nnx.with_partitioning(draw, ("model", "fsdp"))
            self.up = nnx.Linear(16, 32, rngs=rngs, kernel_init=into)
            self.down = nnx.Linear(32, 8, rngs=rngs, kernel_init=back)

        def __call__(self, x):
            return self.down(nnx.gelu(self.up(x)))

    mesh = mesh_of(2, 2, 2)
    with jax.set_mesh(mesh):
        graph, params = nnx.split(Net(nnx.Rngs(0)))
    specs = nnx.get_partition_spec(params)
    params = nnx.as_pure(params)
    specs = nnx.as_pure(specs)
    params = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), params, specs)

    def loss(params, batch, key):
        return jnp.mean((nnx.merge(graph, params)(batch[0]) - batch[1]) ** 2)

    tx = jrc.dgc_momentum(0.1, 0.9, 0, sparsity=0.9, min_size=100, axis_name="replica")
    state = jrc.init_state(params, tx, jax.random.key(0), mesh=mesh, axis_name="replica")
    step = jrc.make_train_step(loss, tx, mesh=mesh, axis_name="replica")
    for batch in batches(3):
        state, info = step(state, batch)
    kernel = state.opt_state[0].v["up"]["kernel"]
    assert kernel.sharding.spec == P("replica", "fsdp", "model") and np.isfinite(info.loss)


def test_an_equinox_model_that_is_sharded():
    eqx = pytest.importorskip("equinox")
    mesh = mesh_of(4, 2)
    model = eqx.nn.MLP(16, 8, 32, 2, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_array)

    def split(x):
        spec = P("model", "fsdp") if x.ndim == 2 and x.shape[1] % 4 == 0 else P()
        return eqx.filter_shard(x, NamedSharding(mesh, spec))

    params = jax.tree.map(split, arrays)

    def loss(params, batch, key):
        return jnp.mean((jax.vmap(eqx.combine(params, static))(batch[0]) - batch[1]) ** 2)

    tx = optax.adamw(1e-2)
    state = jrc.init_state(params, tx, jax.random.key(0), mesh=mesh, axis_name="fsdp")
    step = jrc.make_train_step(loss, tx, mesh=mesh, axis_name="fsdp", via="jit")
    for batch in batches(3):
        state, info = step(state, batch)
    weight = state.opt_state[0].mu.layers[0].weight
    assert weight.sharding.spec == P("model", "fsdp") and np.isfinite(info.loss)


@pytest.mark.slow
def test_multi_steps_around_compression_gets_the_specs():
    mesh = mesh_of(2, 2, 2)
    dgc = jrc.dgc_momentum(0.05, 0.9, 0, sparsity=0.9, axis_name="replica", min_size=100)
    tx = optax.MultiSteps(dgc, 2)
    state = start(tx, mesh, axis="replica")
    assert state.opt_state.acc_grads["a"].sharding.spec == P(("replica", "fsdp"), "model")
    step = jrc.make_train_step(loss_fn, tx, mesh=mesh, axis_name="replica")
    for batch in batches(4):
        state, info = step(state, batch)
        assert state.opt_state.acc_grads["a"].sharding.spec == P(("replica", "fsdp"), "model")
    assert int(state.opt_state.gradient_step) == 2 and np.isfinite(info.loss)


@pytest.mark.parametrize("outer", [None, jrc.DiLoCo(2)])
def test_multi_steps_on_explicit_axes(outer):
    mesh = mesh_of(2, 2, 2, kind=EXPLICIT)
    run = {"mesh": mesh, "axis_name": "replica", "outer": outer}
    tx = optax.MultiSteps(optax.adam(0.01), 2)
    state = jrc.init_state(placed(some_params(), mesh, SPECS), tx, jax.random.key(0), **run)
    step = jrc.make_train_step(loss_fn, tx, **run)
    losses = []
    for batch in [next(batches())] * 4:
        state, info = step(state, batch)
        losses.append(float(np.mean(info.loss if outer is None else info.losses)))
    assert losses[0] == losses[1] > losses[2]


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_a_batch_from_elsewhere_is_placed(kind):
    """On one device, or on the mesh of `jax.set_mesh` with other types of axes."""
    tx, (batch,) = optax.sgd(0.1), batches(1)
    plain = lambda params, batch, key: jnp.mean((batch[0] @ params["a"]) ** 2)  # noqa: E731
    params = {"a": some_params()["a"]}
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(kind,))):
        state = jrc.init_state(params, tx, jax.random.key(0))
        step = jrc.make_train_step(plain, tx, donate=False)
        wanted = float(step(state, batch)[1].loss)
        here = jax.tree.map(jnp.asarray, batch)
        assert float(step(state, here)[1].loss) == pytest.approx(wanted, rel=1e-6)
    alone = jax.device_put(batch, jax.devices()[3])
    assert float(step(state, alone)[1].loss) == pytest.approx(wanted, rel=1e-6)
