"""Plans of functions that are run and not differentiated: `argnums=None`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jrc
from tests.draws import integers, normal


def log_probabilities(w, x, labels):
    logits = jax.nn.log_softmax(x @ w)
    return {
        "each": jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0],
        "count": x.shape[0],
    }


def network(p, x):
    return jnp.sum(jnp.tanh(x @ p.reshape(16, 64)))


def norms(p, x):
    """Norms of the gradients of all examples, which are as many matrices."""
    one = lambda p, x: jnp.sum(jnp.tanh(jnp.tanh(x @ p) @ p.T))  # noqa: E731
    return jnp.sum(jax.vmap(jax.grad(one), (None, 0))(p, x) ** 2, axis=(1, 2))


def close(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6 * np.max(np.abs(b)), rtol=0)


def distances(x):
    return jnp.sum(jnp.abs(x[:, None] - x[None]), axis=-1)


def nearest_and_diameter(x):
    d = distances(x)
    return jnp.min(d, axis=1), jnp.max(d)


def farthest_pair(x):
    return jnp.unravel_index(jnp.argmax(distances(x)), (len(x), len(x)))


def kernel_of_mean_width(x):
    """Sums of a kernel that needs the mean distance first, beside other facts of the distances."""
    d = distances(x)
    return jnp.exp(-d / jnp.mean(d)).sum(1), jnp.max(d), jnp.min(d, axis=1)


def over_the_largest(x):
    d = distances(x)
    return jnp.sum(1 - d / jnp.max(d), axis=1)


def columns_then_rows(x):
    k = jnp.exp(-distances(x))
    return jnp.max(k / jnp.sum(k, axis=0, keepdims=True), axis=1)


def for_each_scale(loop):
    return lambda x: loop(lambda s: over_the_largest(x * s), jnp.arange(1.0, 5.0))


def over_the_largest_of_each(x):
    return jax.vmap(over_the_largest)(x[None] * jnp.arange(1.0, 5.0)[:, None, None])


def largest_of_sequences(w, x):
    z = x @ w
    return jnp.max(z), jnp.sum(jnp.exp(z), axis=-1)


def correlations(x):
    z = (x - x.mean(0, keepdims=True)) / x.std(0, keepdims=True)
    c = jnp.abs(z.T @ z / len(x) - jnp.eye(x.shape[1]))
    return c.max(0), c.argmax(0), jnp.sum(c > 0.1)


def step_of_all_pairs(weights, images, texts):
    """A step of a loss that has labels along both axes of its logits."""

    def cross_entropy(logits):
        labels = jnp.arange(len(logits))[:, None]
        picked = jnp.take_along_axis(logits, labels, axis=1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=1) - picked)

    def loss(p):
        logits = jnp.tanh(images @ p["images"] @ (texts @ p["texts"]).T)
        return cross_entropy(logits) + cross_entropy(logits.T)

    value, gradient = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), value


def tied_log_normalizer(table, h):
    return jax.nn.logsumexp(h @ table.T, axis=-1)


CASES = {
    "log-probabilities": (
        log_probabilities, "20MiB",
        (normal(0, 32, 8192), normal(1, 2048, 32), integers(2, 8192, 2048)),
    ),
    "hessian": (
        jax.hessian(network), "40MiB",
        (normal(0, 1024), normal(1, 512, 16)),
    ),
    "per-example gradients": (
        norms, "16MiB",
        (normal(0, 64, 128), normal(1, 1024, 64)),
    ),
    "nearest and diameter": (nearest_and_diameter, "1MiB", (normal(0, 1024, 4),)),
    "farthest pair": (farthest_pair, "1MiB", (normal(0, 1024, 4),)),
    "kernel of mean width": (kernel_of_mean_width, "1MiB", (normal(0, 1024, 4),)),
    "over the largest": (over_the_largest, "1MiB", (normal(0, 1024, 4),)),
    "columns, then rows": (columns_then_rows, "1MiB", (normal(0, 1024, 4),)),
    "in a loop": (for_each_scale(jax.lax.map), "1MiB", (normal(0, 1024, 4),)),
    "over the largest of each": (over_the_largest_of_each, "1MiB", (normal(0, 1024, 4),)),
    "the largest of two sequences": (
        largest_of_sequences, "1MiB", (normal(0, 8, 1024), normal(1, 2, 1024, 8)),
    ),
    "correlations": (correlations, "6MiB", (normal(0, 128, 1024),)),
    "a step of a loss of all pairs": (
        step_of_all_pairs, "4MiB",
        (
            {"images": 0.1 * normal(0, 16, 16), "texts": 0.1 * normal(1, 16, 16)},
            normal(2, 1024, 16), normal(3, 1024, 16),
        ),
    ),
    "tied embeddings": (
        tied_log_normalizer, "6MiB",  # with a second copy of the table 8 MiB
        (normal(0, 8192, 128), normal(1, 1024, 128)),
    ),
}  # fmt: skip


def block(p, x):
    """Attention of 4 heads and two layers; the scores are wider than all else."""
    heads = lambda y: y.reshape(*y.shape[:2], 4, 16).swapaxes(1, 2)  # noqa: E731
    q, k, v = map(heads, jnp.split(x @ p["qkv"], 3, axis=-1))
    mask = jnp.where(jnp.tri(x.shape[1]), 0, -1e9)[None, None]
    scores = q @ k.swapaxes(-1, -2) / 4 + mask
    x = x + (jax.nn.softmax(scores) @ v).swapaxes(1, 2).reshape(x.shape) @ p["out"]
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def blocks_in_turn(blocks, x):
    for i in range(3):
        x = jax.checkpoint(block)({k: w[i] for k, w in blocks.items()}, x)
    return x


def blocks_in_a_loop(blocks, x):
    return jax.lax.scan(lambda x, p: (jax.checkpoint(block)(p, x), None), x, blocks)[0]


def train_step(blocks):
    """A step as users write it: a loss without the last logits, its gradient, an update."""

    def loss(p, tokens):
        logits = blocks(p["blocks"], p["table"][tokens]) @ p["table"].T
        picked = jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], axis=-1)
        return jnp.mean(jax.nn.logsumexp(logits[:, :-1], axis=-1) - picked[..., 0])

    def step(p, tokens):
        value, gradient = jax.value_and_grad(loss)(p, tokens)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, gradient), value

    return step


def of_a_branch(pick, x):
    return jax.lax.switch(pick, [over_the_largest, lambda x: x[:, 0], lambda x: x.sum(1)], x)


TOKENS = integers(3, 4096, 512).reshape(2, 256)
WEIGHTS = {
    "table": 0.1 * normal(0, 4096, 64),
    "blocks": {
        "qkv": 0.1 * normal(1, 3, 64, 192), "out": 0.1 * normal(2, 3, 64, 64),
        "up": 0.1 * normal(3, 3, 64, 256), "down": 0.1 * normal(4, 3, 256, 64),
    },
}  # fmt: skip
INSIDE = {
    "steps of checkpointed blocks": (train_step(blocks_in_turn), "11MiB", (WEIGHTS, TOKENS)),
    "steps of such blocks in a loop": (train_step(blocks_in_a_loop), "9MiB", (WEIGHTS, TOKENS)),
    "a branch": (of_a_branch, "1MiB", (jnp.int32(0), normal(0, 1024, 4))),
    "a region that is not differentiated": (
        lambda x: jax.checkpoint(over_the_largest)(x).sum(), "1MiB", (normal(0, 1024, 4),)
    ),
    "a branch in a loop": (
        lambda x: jax.lax.map(lambda i: of_a_branch(i % 2, x * (i + 1)), jnp.arange(4)), "1MiB",
        (normal(0, 1024, 4),),
    ),
}  # fmt: skip


TWO_PASSES = (
    "kernel of mean width", "over the largest", "columns, then rows", "in a loop",
    "over the largest of each", "farthest pair",
)  # fmt: skip
MOST_FLOPS = dict.fromkeys(TWO_PASSES, 1.9) | {"a step of a loss of all pairs": 2.9}


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", CASES)
def test_a_function_that_does_not_fit(name):
    fn, budget, args = CASES[name]
    plan = jrc.plan(fn, *args, budget=budget, argnums=None)
    assert plan.verified.peak_bytes <= plan.budget < plan.candidates[0].verified.peak_bytes
    most = MOST_FLOPS.get(name, 1.01)
    assert plan.chunks and plan.verified.flops_ratio < most
    assert jrc.Plan.from_json(plan.to_json()) == plan
    run = jax.jit(plan.apply(fn))
    close(run(*args), jax.jit(fn)(*args))
    memory = run.lower(*args).compile().memory_analysis()
    assert memory.temp_size_in_bytes < plan.verified.peak_bytes


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", INSIDE)
def test_chunks_inside_of_branches_and_of_jax_checkpoint(name):
    fn, budget, args = INSIDE[name]
    plan = jrc.plan(fn, *args, budget=budget, argnums=None)
    assert plan.verified.peak_bytes <= plan.budget < plan.candidates[0].verified.peak_bytes
    is_around = name == "steps of checkpointed blocks"  # examples may go through all blocks
    assert is_around or any(each.path for each in plan.chunks)
    assert jrc.Plan.from_json(plan.to_json()) == plan
    close(jax.jit(plan.apply(fn))(*args), jax.jit(fn)(*args))


@pytest.mark.slow
@pytest.mark.parametrize("name", ("a branch", "a region that is not differentiated"))
def test_the_gradient_of_what_has_chunks_inside(name):
    fn, budget, (*index, x) = INSIDE[name]
    plan = jrc.plan(fn, *index, x, budget=budget, argnums=None)
    found, wanted = (
        jax.jit(jax.grad(lambda x, fn=fn: jnp.sum(jnp.sin(fn(*index, x)))))(x)
        for fn in (plan.apply(fn), fn)
    )
    close(found, wanted)


def test_a_function_that_fits_stays_as_it_is_where_chunks_are_no_faster():
    plan = jrc.plan(jnp.tanh, jnp.ones(100), budget="1GiB", argnums=None)
    assert not plan.chunks and plan.compilations == 1
    assert "nothing is recomputed" in str(plan)


@pytest.mark.parametrize("budget", ["1GiB", 1.0])
def test_a_function_that_fits_runs_in_no_short_slices(budget):
    """Sums along an axis, maxima along others: slices of one column were 12 times as slow."""

    def two(x, w):
        y = lambda: jnp.tanh(x[:, :, None] * w[None])  # noqa: E731
        return y().max((0, 1)), y().sum(-1)

    x, w = normal(0, 1024, 64), normal(1, 64, 128)
    plan = jrc.plan(two, x, w, budget=budget, argnums=None)
    assert all(each.chunks <= 16 for each in plan.chunks)
    whole = plan.candidates[0].verified.seconds
    assert not plan.chunks or plan.verified.seconds < 0.97 * whole


def test_the_least_of_a_function_is_the_fraction_0():
    fn, _, args = CASES["hessian"]
    plan = jrc.plan(fn, *args, budget=0.0, argnums=None)
    assert plan.verified.peak_bytes < plan.candidates[0].verified.peak_bytes / 4


def test_a_function_that_fits_runs_in_chunks_where_they_are_faster():
    """Of a hessian 128 MiB are new memory in each run, which a CPU waits for."""
    fn, _, args = CASES["hessian"]
    plan = jrc.plan(fn, *args, budget="1GiB", argnums=None)
    whole, *others = plan.candidates
    assert plan.chunks and 1 <= len(others) <= 2
    assert plan.verified.seconds < 0.97 * whole.verified.seconds
    close(jax.jit(plan.apply(fn))(*args), jax.jit(fn)(*args))


TEXTS = normal(0, 32, 8192), normal(1, 2048, 32), integers(2, 8192, 2048)
ROWS, COPIED = P("data"), P()
ON_MESHES = {
    "columns of a head": (AxisType.Auto, log_probabilities, (P(None, "model"), ROWS, ROWS), TEXTS),
    "gathered head": (AxisType.Auto, log_probabilities, (ROWS, ROWS, ROWS), TEXTS),
    "copied head": (AxisType.Explicit, log_probabilities, (COPIED, ROWS, ROWS), TEXTS),
    "hessian": (AxisType.Auto, jax.hessian(network), (COPIED, ROWS),
                (normal(0, 1024), normal(1, 512, 16))),
    "data first": (AxisType.Explicit, lambda x, p: norms(p, x), (P(("data", "model")), COPIED),
                   (normal(1, 1024, 64), normal(0, 64, 128))),
}  # fmt: skip


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("name", ON_MESHES)
def test_a_function_on_a_mesh_in_chunks_of_what_a_device_has(name):
    kind, fn, specs, args = ON_MESHES[name]
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    args = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(args, specs, strict=True)]
    with jax.set_mesh(mesh):
        plan = jrc.plan(fn, *args, budget=0.3, argnums=None)
        found = jax.jit(plan.apply(fn))(*args)
        wanted = jax.jit(fn)(*args)
    baseline = plan.candidates[0].verified.peak_bytes
    assert plan.verified.peak_bytes <= plan.budget < baseline / 2
    assert all("data" in each.names for chunks in plan.chunks for each in chunks.shards)
    assert plan.chunks and all(chunks.shards for chunks in plan.chunks)
    assert jrc.Plan.from_json(plan.to_json()) == plan
    close(found, wanted)


@pytest.mark.parametrize("scale", [2.0, np.float32(2), None])
def test_a_number_beside_data_on_a_mesh(scale):
    """It is an input of the program where it is a number, and none of the function's arrays."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    fn = lambda w, s, x: jnp.max(jax.nn.softmax(jnp.tanh(x) @ w * (s or 1.0)), -1)  # noqa: E731
    if isinstance(scale, np.float32):
        fn = lambda w, s, x: jnp.max(jax.nn.softmax(jnp.tanh(x) @ w * s), -1)  # noqa: E731
    x = jax.device_put(normal(1, 1024, 16), NamedSharding(mesh, P("data")))
    plan = jrc.plan(fn, normal(0, 16, 2048), scale, x, budget=0.3, argnums=None)
    assert [each.names for chunks in plan.chunks for each in chunks.shards] == [("data",)]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_largest_weight_beside_data_on_a_mesh(kind):
    """Of an array that all devices hold, and of one that they split."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))

    def fn(w, x):
        return jnp.max(w), jnp.any(x > 9), jnp.max(jax.nn.softmax(x @ w), axis=1)

    args = normal(0, 16, 2048), normal(1, 1024, 16)
    args = [jax.device_put(x, NamedSharding(mesh, each))
            for x, each in zip(args, (P(), P("data")), strict=True)]  # fmt: skip
    with jax.set_mesh(mesh):
        plan = jrc.plan(fn, *args, budget=0.3, argnums=None)
        assert [each.names for chunks in plan.chunks for each in chunks.shards] == [("data",)]
        close(jax.jit(plan.apply(fn))(*args), jax.jit(fn)(*args))


def test_constants_and_counts_beside_data_on_explicit_axes():
    """Outside of `jax.set_mesh` what is made inside lies on no mesh; XLA splits it all the same."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    table = normal(3, 64, 2048)

    def numbered(x):
        scores = jax.nn.softmax(jnp.tanh(x @ table), axis=1)
        return jnp.max(scores * jnp.arange(x.shape[0])[:, None], axis=1)

    x = jax.device_put(normal(1, 2048, 64), NamedSharding(mesh, P("data")))
    plan = jrc.plan(numbered, x, budget=0.3, argnums=None)
    assert [each.names for chunks in plan.chunks for each in chunks.shards] == [("data",)]
    close(jax.jit(plan.apply(numbered))(x), jax.jit(numbered)(x))


def test_chunks_are_as_few_as_a_budget_allows():
    """A product of a Hessian with a vector: nothing in it is as wide as what a budget leaves."""

    def loss(layers, x):
        for w in layers:
            x = x + jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def product(layers, v, x):
        return jax.jvp(lambda p: jax.grad(loss)(p, x), (layers,), (v,))[1]

    layers = list(normal(0, 4, 32, 32, scale=1 / 6))
    args = layers, layers, normal(1, 2048, 32)
    plan = jrc.plan(product, *args, budget="70%", argnums=None)
    (chunks,) = plan.chunks
    assert 2 <= chunks.chunks <= 8 and plan.verified.flops_ratio < 1.01
    assert plan.compilations <= 8 and f"1 region in {chunks.chunks} chunks" in str(plan)
    close(jax.jit(plan.apply(product))(*args), product(*args))


def test_what_does_not_fit_in_chunks_either():
    _, _, args = CASES["log-probabilities"]
    with pytest.raises(
        jrc.BudgetError, match=r"jrc\.plan: the least peak that was found of `cumsum` is"
    ) as e:
        jrc.plan(jnp.cumsum, args[0].reshape(-1), budget=1000, argnums=None)
    assert e.value.least_bytes == e.value.plan.verified.peak_bytes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"has_aux": True}, "got has_aux=True"),
        ({"offload": True}, "got offload=True"),
        ({"verify": False}, "got verify=False"),
        ({"measure": True}, "got measure=True"),
        ({"chunks": False}, "got chunks=False"),
        ({"cache": "plans"}, "got cache='plans'"),
    ],
)
def test_options_of_gradients(options, said):
    with pytest.raises(ValueError, match=f"argnums=None must be used with .*{said}, which is of"):
        jrc.plan(jnp.tanh, jnp.ones(3), budget="1MB", argnums=None, **options)


def test_arrays_of_numpy_are_arguments():
    """As they are of the function under `jax.jit`, and not constants of its program."""
    x = normal(0, 256, 256)
    y = np.ones((256, 256), np.float32)
    fn = lambda p, q: (p + 1, q * 2)  # noqa: E731
    plan = jrc.plan(fn, x, y, argnums=None, budget="1GiB")
    memory = jax.jit(fn).lower(x, y).compile().memory_analysis()
    assert plan.verified.peak_bytes == memory.argument_size_in_bytes + memory.output_size_in_bytes
    assert (plan.apply(fn)(x, y)[1] == y * 2).all()


def test_an_unknown_option_is_named():
    with pytest.raises(TypeError, match="got foo="):
        jrc.remat.plan_for_each(jnp.sin, 1.0, budgets=[1.0], argnums=None, foo=1)


def test_donated_arguments_are_counted_once():
    """As of a step under `jax.jit(..., donate_argnums=0)`."""
    params = {"w": normal(0, 512, 512), "b": normal(1, 512)}
    x = normal(2, 64, 512)

    def step(params, x):
        return jax.tree.map(lambda p: p - 0.1 * jnp.sum(jnp.tanh(x @ params["w"])), params)

    donates = jax.jit(step, donate_argnums=0)
    memory = donates.lower(params, x).compile().memory_analysis()
    plan = jrc.plan(donates, params, x, argnums=None, budget="1GiB")
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert memory.alias_size_in_bytes > 2**20
    assert plan.verified.peak_bytes == peak - memory.alias_size_in_bytes
    kept = jrc.plan(jax.jit(step), params, x, argnums=None, budget="1GiB")
    assert kept.verified.peak_bytes == peak
    jax.block_until_ready(plan.apply(donates)(params, x))
    many = {str(i): x for i in range(3)}  # more donated arrays than the step has arguments
    decayed = jax.jit(lambda many, x: jax.tree.map(jnp.sin, many), donate_argnums=0)
    assert jrc.plan(decayed, many, x, argnums=None, budget="1GiB").verified
    static = jax.jit(lambda p, n: p * n, static_argnums=1, donate_argnums=0)
    assert jrc.plan(static, params["w"], 2, argnums=None, budget="1GiB").verified
