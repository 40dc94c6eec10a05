"""Chunks inside of `shard_map`, and in a train step."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jrc
from tests.draws import integers, normal

W, X, LABELS = normal(0, 6, 50), normal(1, 32, 6), integers(2, 50, 32)


def loss(w, x, labels):
    logits = jax.nn.log_softmax(x @ w)
    return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], axis=1))


def joined(w, x, labels):
    return jnp.sum(jnp.sin(jrc.chunked(lambda w, x: jnp.tanh(x @ w), (None, 0), chunks=4)(w, x)))


CASES = {
    "sum": (loss, jrc.chunked(loss, (None, 0, 0), chunks=4)),
    "joined": (lambda w, x, labels: jnp.sum(jnp.sin(jnp.tanh(x @ w))), joined),
}


@pytest.mark.slow(after=1, every=True)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("check_vma", [True, False])
def test_the_gradient_of_a_shared_weight_is_summed_once(name, check_vma):
    """The all-reduce is not in the loop: the compiled program has as many as without chunks."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def step(fn):
        def local(w, x, labels):
            gradient = jax.grad(fn)(w, x, labels)
            return gradient if check_vma else jax.lax.psum(gradient, "data")

        specs = (P(), P("data"), P("data"))
        run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
        return jax.jit(run).lower(W, X, LABELS).compile()

    plain, chunked = map(step, CASES[name])
    wanted, found = plain(W, X, LABELS), chunked(W, X, LABELS)
    assert float(jnp.max(jnp.abs(found - wanted))) <= 2e-6 * float(jnp.max(jnp.abs(wanted)))
    count = lambda compiled: compiled.as_text().count("all-reduce(")  # noqa: E731
    assert count(chunked) == count(plain) == 1


def head(params, batch, key):
    x, labels = batch
    logits = jnp.tanh(x @ params["a"]) @ params["w"]
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


@pytest.mark.exhaustive
def test_the_budget_of_a_train_step():
    """Logits are 16 MiB on each of two devices; the whole step fits 12 MiB."""
    params = {
        "a": normal(0, 32, 32, scale=1 / 6),
        "w": normal(1, 32, 4096, scale=1 / 6),
    }
    batch = normal(2, 2048, 32), integers(3, 4096, 2048)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    tx, ends = optax.adam(1e-3), []
    for budget in (None, "12MiB"):
        state = jrc.init_state(params, tx, jax.random.key(5), mesh=mesh)
        step = jrc.make_train_step(head, tx, mesh=mesh, memory_budget=budget)
        for _ in range(2):
            state, _ = step(state, batch)
        ends.append(state.params)
    assert step.plan.chunks and step.plan.verified.peak_bytes <= step.plan.budget
    for a, b in zip(*map(jax.tree.leaves, ends), strict=True):
        assert float(jnp.max(jnp.abs(a - b))) < 1e-5


def steps(params, x):
    """A sum over layers in a loop, each wide in its middle, and a mean over devices."""
    layer = lambda x, w: (x + jnp.tanh(x @ w) @ w.T, None)  # noqa: E731
    x, _ = jax.lax.scan(layer, x, params["layers"])
    return jax.lax.pmean(jnp.mean(x**2), "data")


def words(params, x):
    """The head is gathered, and scores are as wide as its words."""
    w = jax.lax.all_gather(params["w"], "data", axis=1, tiled=True)
    score = jax.nn.logsumexp(jnp.tanh(x @ params["a"]) @ w, axis=-1)
    return jax.lax.pmean(jnp.mean(score), "data")


INSIDE = {
    "loop": (steps, {"layers": normal(4, 3, 32, 2048, scale=1 / 6)}, {"layers": P()}, (0, 0)),
    "gathered": (words, {"a": normal(0, 32, 32), "w": normal(1, 32, 4096)},
                 {"a": P(), "w": P(None, "data")}, (0,)),
}  # fmt: skip


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", INSIDE)
def test_regions_inside_of_a_shard_map_that_the_loss_has(name, check_vma):
    """What is wide has 8 MiB on each device, and all temporaries fit 4; no collective is added."""
    part, params, specs, path = INSIDE[name]
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    loss = jax.shard_map(
        part, mesh=mesh, in_specs=(specs, P("data")), out_specs=P(), check_vma=check_vma
    )
    put = lambda tree, specs: jax.tree.map(  # noqa: E731
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs
    )
    args = put(params, specs), put(normal(2, 2048, 32), P("data"))
    plan = jrc.plan(loss, *args, budget="8MiB")
    assert [each.path for each in plan.chunks] == [path]
    assert plan.verified.peak_bytes <= plan.budget and plan.verified.flops_ratio < 1.3
    assert jrc.Plan.from_json(plan.to_json()) == plan
    plain, planned = (
        jax.jit(jax.value_and_grad(fn)).lower(*args).compile() for fn in (loss, plan.apply(loss))
    )
    for kind in ("all-reduce(", "all-gather(", "reduce-scatter("):
        assert planned.as_text().count(kind) == plain.as_text().count(kind)
    for a, b in zip(*map(jax.tree.leaves, (plain(*args), planned(*args))), strict=True):
        assert float(jnp.max(jnp.abs(a - b))) <= 4e-6 * float(jnp.max(jnp.abs(a)))


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_plan_of_one_part_is_applied_inside_of_a_shard_map(check_vma):
    """There the program has casts that it did not have where it was planned."""
    params = {"a": normal(0, 32, 32, scale=1 / 6), "w": normal(1, 32, 4096, scale=1 / 6)}
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    batch = normal(2, 2048, 32), integers(3, 4096, 2048)
    plan = jrc.plan(head, params, tuple(x[:512] for x in batch), None, budget="4MiB")
    assert plan.chunks

    def part(params, batch):
        gradient = jax.grad(plan.apply(head))(params, batch, None)
        if check_vma:  # then the derivative of a cast has summed it
            return jax.tree.map(lambda g: g / 4, gradient)
        return jax.lax.pmean(gradient, "data")

    specs = (P(), P("data"))
    run = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    found, wanted = jax.jit(run)(params, batch), jax.grad(head)(params, batch, None)
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert float(jnp.max(jnp.abs(a - b))) <= 4e-6 * float(jnp.max(jnp.abs(b)))


def columns(w, x):
    """A layer whose columns are split over "model", as tensor parallelism has it."""
    score = jax.nn.logsumexp(jnp.tanh(jnp.tanh(x) @ w), axis=-1)
    return jnp.mean(score**2)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("rows", [P("data"), P()])
def test_data_that_are_alike_where_weights_are_split(check_vma, rows):
    """The gradient by a slice is that of all devices once, though the slice is cast for each."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs = P(None, "model"), rows
    names = ("model", *rows)
    loss = jax.shard_map(
        lambda w, x: jax.lax.pmean(columns(w, x), names),
        mesh=mesh,
        in_specs=specs,
        out_specs=P(),
        check_vma=check_vma,
    )
    args = normal(0, 32, 4096, scale=1 / 6), normal(1, 1024, 32)
    plan = jrc.plan(loss, *args, budget="4MiB", argnums=(0, 1))
    assert plan.chunks
    wanted, found = (
        jax.jit(jax.value_and_grad(fn, (0, 1)))(*args) for fn in (loss, plan.apply(loss))
    )
    for a, b in zip(*map(jax.tree.leaves, (wanted, found)), strict=True):
        assert float(jnp.max(jnp.abs(a - b))) <= 4e-6 * float(jnp.max(jnp.abs(a)))


@pytest.mark.parametrize("which", ["planned outside", "by hand"])
def test_replicated_data_inside_of_a_shard_map(which):
    """Both are made without devices, and run where the weights vary and the data do not."""
    score = lambda w, x: jnp.mean(jnp.tanh(jnp.tanh(x) @ w) ** 2)  # noqa: E731
    w, x = normal(0, 32, 4096, scale=1 / 6), normal(1, 1024, 32)
    if which == "by hand":
        lean = jrc.chunked(score, in_axes=(None, 0), chunks=4)
    else:
        plan = jrc.plan(score, w[:, :1024], x, budget="3MiB", argnums=(0, 1))
        assert plan.chunks
        lean = plan.apply(score)
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))

    def gradients(fn):
        part = lambda w, x: jax.lax.pmean(fn(w, x), "model")  # noqa: E731
        run = jax.shard_map(part, mesh=mesh, in_specs=(P(None, "model"), P()), out_specs=P())
        return jax.jit(jax.grad(run, (0, 1)))(w, x)

    for a, b in zip(gradients(lean), gradients(score), strict=True):
        assert float(jnp.max(jnp.abs(a - b))) <= 4e-6 * float(jnp.max(jnp.abs(b)))
