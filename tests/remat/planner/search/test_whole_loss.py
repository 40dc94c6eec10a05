"""Plans that run the whole loss in chunks, each under a plan of its own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jrc
from jrc._jaxpr import flops
from jrc.remat._planner.search.chunks import Wanted
from jrc.remat._planner.search.peaks import Peaks
from jrc.remat._planner.search.problem import Problem, Request
from jrc.remat._planner.search.whole_loss import in_chunks_of_loss, whole_loss_chunks

DRAW = np.random.default_rng(0)


def normal(*shape, scale=1.0):
    return jnp.asarray(scale * DRAW.normal(size=shape), jnp.float32)


WEIGHTS = [normal(128, 128, scale=0.05) for _ in range(4)]
X = normal(8192, 128)
Y = jnp.asarray(DRAW.integers(0, 128, 8192), jnp.int32)


def forward(weights, x):
    for w in weights[:-1]:
        x = jnp.tanh(x @ w)
    return x @ weights[-1]


def loss(weights, x, y):
    return cross_entropy(forward(weights, x), y)


def cross_entropy(logits, y):
    picked = jnp.take_along_axis(logits, y[:, None], axis=-1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def loss_and_metrics(weights, x, y):
    logits = forward(weights, x)
    right = jnp.mean(jnp.argmax(logits, axis=-1) == y)
    norm = jnp.sqrt(jnp.mean(logits**2))
    return cross_entropy(logits, y), {"accuracy": right, "norm": norm, "of 3": jnp.sum(y == 3)}


def scanned(weights, x, y):
    layer = lambda x, w: (x + jnp.tanh(x @ w), None)  # noqa: E731
    return cross_entropy(jax.lax.scan(layer, x, weights)[0], y)


def close(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a), np.asarray(b)
        assert np.max(np.abs(a - b)) <= 2e-6 * max(np.max(np.abs(b)), 1e-6)


@functools.cache
def planned(fn, budget="14MiB"):
    """The plan of a loss; `loss_and_metrics` and `two_terms` have more results."""
    has_aux = fn not in (loss, scanned)
    return jrc.plan(fn, *args_of(fn), budget=budget, has_aux=has_aux, minimize="flops")


def args_of(fn):
    return (jnp.stack(WEIGHTS) if fn is scanned else WEIGHTS), X, Y


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("fn", "budget"),
    [(loss, "8MiB"), (loss_and_metrics, "14MiB"), (scanned, "14MiB"), (loss_and_metrics, "8MiB")],
)
def test_a_loss_of_examples_runs_in_chunks(fn, budget):
    plan, args, has_aux = planned(fn, budget), args_of(fn), fn is loss_and_metrics
    assert plan.plans_one_chunk and len(plan.chunks) == 1
    assert plan.verified.peak_bytes <= plan.budget
    assert plan.verified.flops_ratio < 1.01 or fn is loss_and_metrics
    again = jrc.Plan.from_json(plan.to_json())
    assert again == plan
    run = jax.jit(jax.value_and_grad(again.apply(fn), has_aux=has_aux))
    close(run(*args), jax.jit(jax.value_and_grad(fn, has_aux=has_aux))(*args))
    assert f"the whole loss in {plan.chunks[0].chunks} chunks" in str(plan)


@pytest.mark.slow
@pytest.mark.parametrize("fn", [loss, loss_and_metrics])
def test_the_last_of_a_prime_number_of_examples_are_a_shorter_chunk(fn):
    args, has_aux = (WEIGHTS, X[:8191], Y[:8191]), fn is loss_and_metrics
    plan = jrc.plan(fn, *args, budget="14MiB", has_aux=has_aux, minimize="flops")
    assert plan.plans_one_chunk and plan.chunks[0].chunks < 100
    again = jrc.Plan.from_json(plan.to_json())
    assert again == plan and plan.verified.peak_bytes <= plan.budget
    run = jax.jit(jax.value_and_grad(again.apply(fn), has_aux=has_aux))
    close(run(*args), jax.jit(jax.value_and_grad(fn, has_aux=has_aux))(*args))
    assert flops(jax.make_jaxpr(run)(*args)) == plan.verified.flops
    with pytest.raises(ValueError, match=r"another program .* was float32\[8191,\d+\], now it is"):
        again.apply(fn)(WEIGHTS, X[:8190], Y[:8190])
    with pytest.raises(TypeError, match="must be a function, got int"):
        again.apply(3)


def test_a_loss_of_data_alone_is_no_loss_of_chunks():
    """Its gradient is zero, and that of a chunk there is none."""
    fn = lambda w, x: jnp.mean(jnp.tanh(x @ jax.lax.stop_gradient(w)) ** 2)  # noqa: E731
    w, x = jnp.ones((16, 1024)), jnp.ones((4096, 16))
    plan = jrc.plan(fn, w, x, budget="400kB")
    assert not plan.plans_one_chunk and plan.verified.peak_bytes <= 400_000
    np.testing.assert_array_equal(jax.jit(jax.grad(plan.apply(fn)))(w, x), jnp.zeros_like(w))


def test_flops_are_those_of_the_program_that_runs():
    plan = planned(loss_and_metrics)
    run = jax.value_and_grad(plan.apply(loss_and_metrics), has_aux=True)
    assert plan.verified.flops == flops(jax.make_jaxpr(run)(WEIGHTS, X, Y).jaxpr)


@pytest.mark.slow
def test_a_derivative_along_a_direction_is_that_of_the_function():
    small = [w + 0.1 for w in WEIGHTS]
    found, wanted = (
        jax.jit(lambda w, fn=fn: jax.jvp(lambda w: fn(w, X, Y), (w,), (small,)))(WEIGHTS)
        for fn in (planned(loss).apply(loss), loss)
    )
    close(found, wanted)


def test_another_loss_is_refused():
    plan = planned(loss)
    with pytest.raises(ValueError, match=r"jrc\.Plan\.apply: this plan was made for another"):
        plan.apply(lambda w, x, y: loss(w, jnp.sin(x), y))(WEIGHTS, X, Y)
    with pytest.raises(ValueError, match=r"the whole loss in \d+ chunks.*chunks=False"):
        plan.policy()


def normalized(weights, x, y):
    return loss(weights, x - jnp.mean(x @ weights[0], axis=0, keepdims=True), y)


def contrastive(weights, x, y):
    z = forward(weights, x)
    return jnp.mean(jax.nn.logsumexp(z @ z.T, axis=-1)) + jnp.sum(y)


def two_losses(weights, x, y):
    logits = forward(weights, x)
    return jnp.mean(logits**2) / jnp.mean(jnp.abs(logits))


@pytest.mark.parametrize("fn", [normalized, contrastive, two_losses])
def test_a_loss_of_all_examples_together_stays_whole(fn):
    problem = Problem.of(Request(fn, (WEIGHTS, X, Y)))
    assert whole_loss_chunks(Problem.of(Request(loss, (WEIGHTS, X, Y))), 2**22)
    assert not whole_loss_chunks(problem, 2**22)


@pytest.mark.slow
def test_a_train_step_within_a_budget():
    step = jrc.make_train_step(
        lambda params, batch, key: loss(params, *batch), optax.sgd(0.1), memory_budget="3MiB"
    )
    plain = jrc.make_train_step(lambda params, batch, key: loss(params, *batch), optax.sgd(0.1))
    copies = [[jnp.copy(w) for w in WEIGHTS] for _ in range(2)]
    state, other = (jrc.init_state(each, optax.sgd(0.1), jax.random.key(1)) for each in copies)
    state, _ = step(state, (X, Y))
    other, _ = plain(other, (X, Y))
    assert step.plan.plans_one_chunk
    sums = [
        each.lower(state, (X, Y)).compile().as_text().count(" all-reduce(")
        for each in (step, plain)
    ]
    assert sums[0] == sums[1]  # over devices once, and not once a chunk
    close(state.params, other.params)


@pytest.mark.exhaustive
def test_batches_are_not_any_that_chunks_of_the_loss_would_fit():
    def make_args(batch):
        shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
        return WEIGHTS, shape((batch, 128)), jax.ShapeDtypeStruct((batch,), jnp.int32)

    found = jrc.largest_batch(make_args, loss, "24MiB", most=2**16)
    assert found.recomputed < 2**16
    assert found.plan.plans_one_chunk and found.plan.verified.flops_ratio < 1.001
    assert found.fastest.batch == found.recomputed


@pytest.mark.parametrize(("dtype", "apart"), [(jnp.float32, 0), (jnp.bfloat16, 4 * 512**2 * 4)])
def test_sums_of_gradients_lie_where_the_gradients_are_returned(dtype, apart):
    weights = [jax.ShapeDtypeStruct((512, 512), dtype)] * 4
    args = weights, jax.ShapeDtypeStruct((4096, 512), dtype), jax.ShapeDtypeStruct((4096,), "int32")
    peaks = Peaks(Problem.of(Request(loss, args, minimize="flops")))
    problem = peaks.problem
    last = whole_loss_chunks(problem, problem.baseline.peak // 16)[-1]
    chunk = in_chunks_of_loss(problem, last)
    of_chunk = sum(x.size * x.dtype.itemsize for x in weights)
    # Gradients of a chunk, and what it saves; sums in another type lie apart.
    saved = chunk.baseline.peak - of_chunk - apart
    assert 0 < saved < of_chunk
    run = jax.value_and_grad(chunk.function.applied(chunk.baseline.whole))
    memory = jax.jit(run).lower(*args).compile().memory_analysis()
    assert apart < memory.temp_size_in_bytes < chunk.baseline.peak + of_chunk / 4


def cast_in_front(weights, x, y):
    return loss([w.astype(jnp.bfloat16) for w in weights], x, y)


def product_in_front(weights, x, y):
    """The derivative of `tanh` reads its result, and that of the sine what `tanh` is of."""
    first, second, *rest = weights
    return loss([jnp.sin(2 * jnp.tanh(first @ second)), *rest], x, y)


@pytest.mark.parametrize(("fn", "kept"), [(cast_in_front, 4 * 2), (product_in_front, 2 * 4)])
def test_what_is_made_in_front_of_the_chunks_and_lies_there_counts(fn, kept):
    weights = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 4
    args = weights, jax.ShapeDtypeStruct((4096, 512), "float32"), jax.ShapeDtypeStruct((4096,), "i")
    peaks, temporaries = [], []
    for each in (fn, loss):
        problem = Problem.of(Request(each, args, minimize="flops"))
        most = whole_loss_chunks(problem, problem.baseline.peak // 16)[-1]
        chunk = in_chunks_of_loss(problem, dataclasses.replace(most, chunks=64))
        run = jax.value_and_grad(chunk.function.applied(chunk.baseline.whole))
        memory = jax.jit(run).lower(*args).compile().memory_analysis()
        peaks.append(chunk.baseline.peak)
        temporaries.append(memory.temp_size_in_bytes)
    assert 0.99 <= (peaks[0] - peaks[1]) / (kept * 512**2) <= 1.1
    assert temporaries[0] - temporaries[1] > 0.4 * kept * 512**2


@jax.custom_jvp
def one(x):
    return jnp.float32(1.0)


one.defjvp(lambda primals, tangents: (jnp.float32(1.0), jnp.float32(0.0)))


def constant_in_front(weights, x, y):
    return loss(weights, x * one(weights[0]), y)


def returned_from_front(weights, x, y):
    first, second, *rest = weights
    made = first @ second
    return loss([made, *rest], x, y), made


def test_constants_and_results_of_the_function_in_front_do_not_count():
    """A derivative rule that returns a constant makes a literal of what is in front."""
    peaks = {}
    for fn in (constant_in_front, returned_from_front, loss):
        request = Request(fn, (WEIGHTS, X, Y), has_aux=fn is returned_from_front)
        problem = Problem.of(request)
        most = whole_loss_chunks(problem, problem.baseline.peak // 16)[-1]
        chunk = in_chunks_of_loss(problem, dataclasses.replace(most, chunks=64))
        peaks[fn] = chunk.baseline.peak
    of_chunk, of_weight = X.nbytes // 64, WEIGHTS[0].nbytes  # the product with the constant
    assert peaks[loss] <= peaks[constant_in_front] <= peaks[loss] + of_chunk + 2**6
    assert peaks[returned_from_front] <= peaks[loss] + of_weight


def of_columns(w, x, table):
    return jnp.mean((table.T @ jnp.exp(jnp.tanh(x @ w[:, :1024]))) ** 2)


def test_rows_of_a_table_are_no_chunks_beside_a_wide_product_in_front():
    """Chunks of columns need no wide value, chunks of the table's rows read a wide one whole."""
    w, x, table = normal(32, 2048, scale=0.1), normal(512, 32), normal(512, 2048)
    plan = jrc.plan(of_columns, w, x, table, budget="6MiB", minimize="flops")
    assert plan.verified.flops_ratio < 1.01


@pytest.mark.slow
def test_the_least_of_a_refusal_is_in_chunks():
    given = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((WEIGHTS, WEIGHTS, X, Y)))
    options = {"budget": given + 2**10, "minimize": "flops"}
    with pytest.raises(jrc.BudgetError, match=r"pinned most by \w+:\(8192,128\)@") as whole:
        jrc.plan(loss, WEIGHTS, X, Y, chunks=False, **options)
    with pytest.raises(jrc.BudgetError, match=r"with \w+:\(8192,128\)@\S+ in chunks") as info:
        jrc.plan(loss, WEIGHTS, X, Y, **options)
    assert info.value.least_bytes < whole.value.least_bytes / 1.5
    assert info.value.plan.verified.peak_bytes == info.value.least_bytes


def two_terms(weights, x, y):
    logits = forward(weights, x)
    z = jax.nn.logsumexp(logits, axis=-1)
    return cross_entropy(logits, y) + 1e-4 * jnp.mean(z**2), jnp.mean(z)


@pytest.mark.slow
def test_a_loss_of_several_terms_is_one_sum():
    plan = planned(two_terms)
    assert plan.plans_one_chunk and plan.verified.flops_ratio < 1.01
    run = jax.jit(jax.value_and_grad(plan.apply(two_terms), has_aux=True))
    close(run(WEIGHTS, X, Y), jax.jit(jax.value_and_grad(two_terms, has_aux=True))(WEIGHTS, X, Y))


def test_half_precision_inside_is_not_differentiated_before_it_is_scaled():
    def half(weights, x, y):
        return jnp.mean(forward(weights, x).astype(jnp.float16).astype(jnp.float32) ** 2) / 2**20

    problem = Problem.of(Request(half, (WEIGHTS, X, Y)))
    assert not whole_loss_chunks(problem, 2**22)
    lean = jrc.chunked(half, (None, 0, 0), None, chunks=16)
    found, wanted = (jax.grad(fn)(WEIGHTS, X, Y) for fn in (lean, half))
    for a, b in zip(found, wanted, strict=True):
        assert float(jnp.max(jnp.abs(a - b))) <= 2e-2 * float(jnp.max(jnp.abs(b)))


def test_a_stored_plan_is_found_again(tmp_path):
    given = {"budget": "14MiB", "minimize": "flops", "cache": tmp_path}
    first = jrc.plan(loss, WEIGHTS, X, Y, **given)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert first == planned(loss) and jrc.plan(loss, WEIGHTS, X, Y, **given) == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def of_sequences(weights, x):
    """One example alone has too wide a middle."""
    for up, down in weights:
        x = x + jnp.tanh(jax.nn.gelu(x @ up) @ down)
    return jnp.mean((x - jnp.mean(x, axis=1, keepdims=True)) ** 2)


def sequences():
    draw = functools.partial(normal, scale=1 / 8)
    return [(draw(16, 2048), draw(2048, 16)) for _ in range(2)], draw(4, 1024, 16)


@pytest.mark.parametrize(("gain", "stay"), [(0.01, False), (0.1, True)])
def test_regions_inside_of_a_chunk_stay_where_they_gain_enough(monkeypatch, gain, stay):
    """Seconds of a loop more are predicted worse than that."""

    def is_inside(problem):
        return len(problem.chunks) > 1 and problem.chunks[0].is_whole_loss

    monkeypatch.setattr(
        "jrc.remat._planner.search.chunks._promised_cost",
        lambda problem, _: 1e15 * (1 - gain * is_inside(problem)),
    )
    peaks = Peaks(Problem.of(Request(of_sequences, sequences(), platform="cpu")))
    found = peaks.in_chunks.found(Wanted(2**23))
    assert found and any(map(is_inside, found)) == stay


@pytest.mark.slow
def test_regions_run_in_chunks_inside_of_a_chunk_of_the_loss():
    """Chunks of examples, and of the tokens of an example inside."""
    args = sequences()
    plan = jrc.plan(of_sequences, *args, budget="8MiB", minimize="flops")
    assert plan.plans_one_chunk and len(plan.chunks) > 1
    assert "inside of each in chunks" in str(plan)
    assert plan.verified.peak_bytes <= plan.budget
    again = jrc.Plan.from_json(plan.to_json())
    assert again == plan
    run = jax.jit(jax.value_and_grad(again.apply(of_sequences)))
    close(run(*args), jax.jit(jax.value_and_grad(of_sequences))(*args))
    assert flops(jax.make_jaxpr(run)(*args)) == plan.verified.flops
