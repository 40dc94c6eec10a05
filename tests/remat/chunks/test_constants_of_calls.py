"""Arrays that functions of a program close over, read in slices by regions in chunks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jrc
from tests.draws import normal

ROWS, WIDTH = 512, 4096
KEPT = (np.random.default_rng(0).random((ROWS, WIDTH)) < 0.9).astype(np.float32)
TABLE = np.random.default_rng(1).normal(size=(WIDTH, 3)).astype(np.float32)
W, X = normal(0, 64, WIDTH, scale=0.1), normal(1, ROWS, 64)
MESH = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))


@jax.jit
def dropped(x):
    """With a mask that is an array of NumPy: it is an operand of the region, row by row."""
    return x * KEPT[: x.shape[0]]


@jax.jit
def with_table(x):
    """With a table whose rows are contracted: the sum over a slice reads a slice of it."""
    return x @ TABLE


@jax.custom_jvp
def through_table(x):
    return jnp.tanh(x) @ TABLE


@through_table.defjvp
def _(primals, tangents):
    (x,), (dx,) = primals, tangents
    return through_table(x), (dx / jnp.cosh(x) ** 2) @ jax.jit(lambda: TABLE * 1)()


def rows(w, x):
    return jnp.mean(jax.nn.logsumexp(dropped(jnp.tanh(x @ w)), axis=1))


def columns(w, x):
    return jnp.mean(with_table(jnp.exp(jnp.tanh(dropped(x @ w)))) ** 2)


def own_rule(w, x):
    return jnp.mean(jnp.sin(through_table(dropped(jnp.sin(x @ w)))))


def in_scan(w, x):
    step = lambda total, part: (total + rows(w, part), None)  # noqa: E731
    return jax.lax.scan(step, 0.0, x.reshape(2, ROWS // 2, -1))[0]


def in_branches(w, x):
    return jax.lax.cond(x[0, 0] > 9, lambda: jnp.mean(x @ w), lambda: rows(w, x))


def in_checkpoint(w, x):
    return jax.checkpoint(rows)(w, x)


@functools.partial(jax.shard_map, mesh=MESH, in_specs=(P(), P("data")), out_specs=P())
def in_shard_map(w, x):
    return jax.lax.pmean(rows(w, x), "data")


def around_scan(w, x):
    """All of the loop runs on slices, with slices of the mask."""
    step = lambda y, i: (jnp.sin(dropped(y) + i), None)  # noqa: E731
    y, _ = jax.lax.scan(step, jnp.tanh(x @ w), jnp.arange(2.0))
    return jnp.mean(jax.nn.logsumexp(y, axis=1))


def around_branches(w, x):
    y = x @ w
    y = jax.lax.cond(x[0, 0] > 9, lambda: dropped(y), lambda: jnp.sin(dropped(y)))
    return jnp.mean(jax.nn.logsumexp(y, axis=1))


def around_checkpoint(w, x):
    block = jax.checkpoint(lambda y: jnp.sin(dropped(jnp.sin(y))))
    return jnp.mean(jax.nn.logsumexp(block(x @ w), axis=1))


LOSSES = [
    *(rows, columns, own_rule, in_scan, in_branches, in_checkpoint, in_shard_map),
    *(around_scan, around_branches, around_checkpoint),
]


def assert_same_gradient(plan, loss, w=W, x=X):
    found, expected = (np.asarray(jax.grad(f)(w, x)) for f in (plan.apply(loss), loss))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * abs(expected).max())


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_arrays_of_called_functions_are_cut(loss):
    """The mask alone has 8 MiB."""
    plan = jrc.plan(loss, W, X, budget="7MiB")
    assert plan.chunks
    assert_same_gradient(plan, loss)


def test_a_region_that_stays_is_cut_with_its_constants():
    plan = jrc.plan(around_checkpoint, W, X, budget="7MiB", respect_checkpoints=True)
    assert plan.chunks
    assert_same_gradient(plan, around_checkpoint)


def test_a_stored_plan_cuts_a_constant_inside_of_a_loop():
    plan = jrc.plan(in_scan, W, X, budget="7MiB")
    again = jrc.Plan.from_json(plan.to_json())
    assert again == plan
    assert_same_gradient(again, in_scan)


def test_on_a_mesh_a_constant_inside_of_a_loop_is_cut():
    mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,))
    w = jax.device_put(W, NamedSharding(mesh, P()))
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    plan = jrc.plan(in_scan, w, x, budget="7MiB")
    assert [each.path for each in plan.chunks] == [(1,)]
    assert_same_gradient(plan, in_scan, w, x)


@jax.jit
def marked(x):
    return checkpoint_name(jnp.tanh(x), "kept") * KEPT


def test_a_cached_trace_reads_arrays_of_called_functions():
    """A call with a mark inside is inlined; the second call of one function is traced before."""

    def block(w, x):
        return jnp.sin(marked(x @ w)) @ TABLE

    def gradient(block, scale):
        return jax.grad(lambda w: jnp.sum(block(w, scale * X) ** 2))(W)

    for scale in (1.0, 2.0):
        found = gradient(lambda *args: jrc.recompute(block, *args), scale)
        np.testing.assert_allclose(found, gradient(block, scale), rtol=1e-5, atol=1e-5)
