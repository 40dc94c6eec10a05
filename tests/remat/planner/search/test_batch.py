import jax
import jax.numpy as jnp
import pytest

import jrc
from jrc.remat._gradient.compiled_memory import memory_needed
from jrc.remat._planner.budget import memory_budget_of

WIDTH = 16


def loss(w, x):
    for _ in range(8):
        x = jnp.tanh(jnp.sin(x @ w))
    return jnp.sum(x)


def make_args(batch):
    shapes = (WIDTH, WIDTH), (batch, WIDTH)
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def peak(fn, batch):
    return memory_needed(jax.jit(jax.value_and_grad(fn)).lower(*make_args(batch))).peak


@pytest.mark.exhaustive
def test_one_step_more_does_not_fit():
    budget, step = 60_000, 12
    found = jrc.largest_batch(make_args, loss, budget, multiple_of=step)
    assert 0 < found.plain < found.recomputed < found.most and "more may" not in str(found)
    assert found.plain % step == found.recomputed % step == 0
    assert peak(loss, found.plain) <= budget < peak(loss, found.plain + step)
    assert found.plan.verified.peak_bytes == peak(found.plan.apply(loss), found.recomputed)
    assert found.plan.verified.peak_bytes <= budget
    with pytest.raises(jrc.BudgetError):
        # With the whole loss in chunks any batch would fit.
        jrc.plan(loss, *make_args(found.recomputed + step), budget=budget, chunks=False)


def test_without_a_budget_it_is_nine_tenths_of_the_device():
    found = jrc.largest_batch(make_args, loss, most=4)
    assert found.recomputed == 4
    assert found.plan.budget == memory_budget_of(jax.devices()[0])
    assert jrc.largest_batch(make_args, loss, most=4, reserve=1000).plan.budget == (
        found.plan.budget - 1000
    )


@pytest.mark.slow
def test_a_head_that_is_nearly_all_of_a_model_runs_in_chunks():
    """Whatever its logits need; what the layers save is what a batch ends at."""

    def classify(p, x, labels):
        for w in p["layers"]:
            x = x + jnp.tanh(x @ w)
        logits = x @ p["head"]
        picked = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=1) - picked)

    def args(batch):
        shapes = {"layers": [(32, 32)] * 4, "head": (32, 4096)}
        weights = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s, jnp.float32),
            shapes,
            is_leaf=lambda s: type(s) is tuple,
        )
        x = jax.ShapeDtypeStruct((batch, 32), jnp.float32)
        return weights, x, jax.ShapeDtypeStruct((batch,), jnp.int32)

    found = jrc.largest_batch(args, classify, "8MiB", multiple_of=64)
    assert found.recomputed > 8 * found.plain > 0
    assert found.plan.chunks and found.plan.verified.peak_bytes <= 2**23


def test_limits():
    none = jrc.largest_batch(make_args, loss, 1000)
    assert none[:5] == (0, 0, None, 2**20, None) and none.least_bytes > 1000
    assert str(none) == "None fits: the smallest batch needs 2.066 KiB. Raise the budget."
    found = jrc.largest_batch(make_args, loss, "1GB", most=100, multiple_of=8)
    assert found.plain == found.recomputed == 96 and not found.plan.reruns
    assert found.most == 96 and "96 with this one (more may: `most` ends there)" in str(found)


def test_errors():
    with pytest.raises(TypeError, match="make_args must be a function, got int"):
        jrc.largest_batch(3, loss, 1000)
    with pytest.raises(TypeError, match="fn must be a function, got NoneType"):
        jrc.largest_batch(make_args, None, 1000)
    with pytest.raises(TypeError, match="A fraction or a share has no meaning"):
        jrc.largest_batch(make_args, loss, 0.5)
    with pytest.raises(ValueError, match="multiple_of must be a whole number >= 1, got 0"):
        jrc.largest_batch(make_args, loss, 1000, multiple_of=0)
    with pytest.raises(
        TypeError, match="must return the arguments of fn as a tuple, got ShapeDtype"
    ):
        jrc.largest_batch(lambda n: jax.ShapeDtypeStruct((n,), jnp.float32), loss, 1000)
    with pytest.raises(ValueError, match="most must be >= multiple_of, .* got most=4, multiple_o"):
        jrc.largest_batch(make_args, loss, 1000, most=4, multiple_of=8)
    with pytest.raises(
        ValueError, match="`<lambda>` must return arguments that grow with the batch"
    ):
        jrc.largest_batch(lambda n: make_args(8), loss, "1MB", most=16)
    with pytest.raises(
        ValueError, match="argnums must be positions of the 0 arguments given to `loss`"
    ):
        jrc.largest_batch(lambda n: (), loss, 1000)


def test_what_make_args_raises_goes_on():
    def fails(batch):
        raise KeyError("rows")

    with pytest.raises(KeyError, match="rows") as info:
        jrc.largest_batch(fails, loss, 1000)
    assert info.value.__notes__ == ["jrc.largest_batch: raised by `fails` for a batch of 1."]


def test_a_budget_below_the_parameters_alone():
    assert jrc.largest_batch(make_args, loss, 4 * WIDTH * WIDTH - 1)[:3] == (0, 0, None)
