"""Indices that count along an axis are indices of each row, with the same values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrc
from jrc._jaxpr import evaluate, inline_all
from jrc._jaxpr.batched_indices import with_batched_indices

DRAW = np.random.default_rng(0)
ROWS = jnp.asarray(DRAW.normal(size=(6, 9)), jnp.float32)
BLOCKS = jnp.asarray(DRAW.normal(size=(3, 6, 9)), jnp.float32)
LABELS = jnp.asarray([3, -1, 0, 8, -9, 5])
TABLE = jnp.asarray(DRAW.integers(-9, 9, (3, 6)))


def batch_axes(fn, *args):
    """The batch axes of the one index of the rewritten program, which gives the same."""
    jaxpr = inline_all(jax.make_jaxpr(fn)(*args).jaxpr)
    new = with_batched_indices(jaxpr)

    def gradient(run):
        return jax.grad(lambda x: jnp.sum(jnp.sin(run(x, *args[1:])[0])))(args[0])

    np.testing.assert_array_equal(evaluate(new)(*args)[0], fn(*args))
    np.testing.assert_array_equal(gradient(evaluate(new)), gradient(evaluate(jaxpr)))
    names = ("gather", "scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max")
    (eqn,) = [eqn for eqn in new.eqns if eqn.primitive.name in names]
    numbers = eqn.params["dimension_numbers"]
    is_gather = eqn.primitive.name == "gather"
    of_index = "start_indices_batching_dims" if is_gather else "scatter_indices_batching_dims"
    return numbers.operand_batching_dims, getattr(numbers, of_index)


@pytest.mark.slow(after=2, every=True)
@pytest.mark.parametrize(
    ("fn", "args", "axes"),
    [
        (lambda x, y: x[jnp.arange(6), y], (ROWS, LABELS), ((0,), (0,))),
        (lambda x, y: x[jnp.arange(6, dtype="uint8"), y], (ROWS, LABELS), ((0,), (0,))),
        (lambda x, y: x[jnp.arange(6), jnp.arange(6)], (ROWS, LABELS), ((0,), (0,))),
        (lambda x, y: x.at[jnp.arange(6), y].get(mode="fill"), (ROWS, LABELS), ((0,), (0,))),
        (lambda x, y: x[y[:3, None] % 3, jnp.arange(6)], (BLOCKS, LABELS), ((1,), (1,))),
        (lambda x, y: x[jnp.arange(3), y[:3] % 6], (BLOCKS, LABELS), ((0,), (0,))),
        (
            lambda x, y: x[jnp.arange(3)[:, None], jnp.arange(6)[None], y],
            (BLOCKS, TABLE),
            ((0, 1), (0, 1)),
        ),
        (
            lambda x, y: x[jnp.arange(3)[None], jnp.arange(6)[:, None], y.T],
            (BLOCKS, TABLE),
            ((0, 1), (1, 0)),
        ),
        (lambda x, y: x.at[jnp.arange(6), y].add(0.5), (ROWS, LABELS), ((0,), (0,))),
        (lambda x, y: x.at[jnp.arange(6), y].set(2 * x[:, 0]), (ROWS, LABELS), ((0,), (0,))),
        (lambda x, y: x.at[jnp.arange(6), y].mul(3.0), (ROWS, LABELS), ((0,), (0,))),
        (lambda x, y: x.at[jnp.arange(6), y].max(0.1), (ROWS, LABELS), ((0,), (0,))),
        (lambda x, y: x.at[jnp.arange(3), y[:3] % 6].add(x[:, 0]), (BLOCKS, LABELS), ((0,), (0,))),
        (
            lambda x, y: x.at[jnp.arange(3)[None], jnp.arange(6)[:, None], y.T].add(x[0, :, :3]),
            (BLOCKS, TABLE),
            ((0, 1), (1, 0)),
        ),
    ],
)
def test_columns_that_count_are_batch_axes(fn, args, axes):
    assert batch_axes(fn, *args) == axes


@pytest.mark.slow(after=2, every=True)
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: x[jnp.arange(5), y[:5]],  # not all rows
        lambda x, y: x[jnp.arange(1, 7) % 6, y],  # from another row on
        lambda x, y: x[jnp.arange(6)[::-1], y],
        lambda x, y: x[jnp.zeros(6, int), y],
        lambda x, y: x[jnp.arange(1) + jnp.zeros(6, int), y],
        lambda x, y: x[y % 6],
        lambda x, y: x.at[jnp.arange(5), y[:5]].add(1.0),
        lambda x, y: x.at[jnp.zeros(6, int), y].add(1.0),
        lambda x, y: jnp.concatenate([x] * 50)[jnp.arange(300, dtype="uint8"), jnp.tile(y, 50)],
    ],
)
def test_others_stay_as_they_are(fn):
    assert batch_axes(fn, ROWS, LABELS) == ((), ())


def picked(logits, labels):
    return jax.nn.logsumexp(logits, axis=1) - logits[jnp.arange(1024), labels]


def lowered(logits, labels):
    """With a margin at the labels."""
    return jax.nn.logsumexp(logits.at[jnp.arange(1024), labels].add(-0.3), axis=1)


def weighed(logits, labels):
    """By one-hot labels, written by a scatter."""
    targets = jnp.zeros_like(logits).at[jnp.arange(1024), labels].set(1.0)
    return -jnp.sum(targets * jax.nn.log_softmax(logits), axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("of_logits", [picked, lowered, weighed])
def test_a_loss_that_indexes_logits_by_rows_runs_in_chunks(of_logits):
    def loss(w, x, labels):
        return jnp.mean(of_logits(x @ w, labels))

    w, x = (jnp.asarray(DRAW.normal(size=s), jnp.float32) for s in ((16, 1024), (1024, 16)))
    labels = jnp.arange(1024) % 1000
    plan = jrc.plan(loss, w, x, labels, budget="1MiB")
    assert plan.chunks and plan.verified.peak_bytes <= plan.budget
    value, gradient = jax.value_and_grad(loss)(w, x, labels)
    found, planned = jax.value_and_grad(plan.apply(loss))(w, x, labels)
    np.testing.assert_allclose(found, value, rtol=1e-6)
    np.testing.assert_allclose(planned, gradient, atol=2e-6 * float(jnp.abs(gradient).max()))
