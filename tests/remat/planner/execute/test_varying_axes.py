"""Plans of losses that have a `jax.shard_map` in them, whose types say over which axes values vary.

Budgets are in bytes: each cuts the program in another place.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jrc
from tests.draws import integers, normal

ROWS, WIDTH, HIDDEN, WORDS = 1024, 32, 256, 1024
WEIGHTS = {"up": normal(0, 2, WIDTH, HIDDEN), "down": normal(1, 2, HIDDEN, WIDTH)}
HEAD, X, LABELS = normal(2, WIDTH, WORDS), normal(3, ROWS, WIDTH), integers(4, WORDS, ROWS)


def layers(function, weights, x, summed=lambda x: x):
    """Two layers in a loop, of which each device may have some columns."""

    def layer(x, w):
        return x + summed(function(x @ w["up"]) @ w["down"]) / HIDDEN, None

    return jax.lax.scan(layer, x, weights)[0]


def unrolled(function, weights, x, summed):
    for i in range(2):
        w = jax.tree.map(lambda w, i=i: w[i], weights)
        x = x + summed(function(x @ w["up"]) @ w["down"]) / HIDDEN
    return x


def examples_apart(function, weights, head, x, labels):
    logits = layers(function, weights, x) @ head
    return jax.lax.pmean(jnp.mean(function(logits) ** 2), ("data", "model"))


def words_apart(layers, weights, head, x, labels):
    """Columns of weights and a part of all words on each device, as in Megatron."""
    x = layers(jax.nn.gelu, weights, x, functools.partial(jax.lax.psum, axis_name="model"))
    logits = x @ head
    top = jax.lax.pmax(jax.lax.stop_gradient(logits.max(-1, keepdims=True)), "model")
    total = jax.lax.psum(jnp.exp(logits - top).sum(-1), "model")
    own = labels - jax.lax.axis_index("model") * logits.shape[-1]
    picked = jnp.take_along_axis(logits, own.clip(0, logits.shape[-1] - 1)[:, None], -1)[:, 0]
    here = (own >= 0) & (own < logits.shape[-1])
    picked = jax.lax.psum(jnp.where(here, picked, 0.0), "model")
    return jax.lax.pmean(jnp.mean(jnp.log(total) + top[:, 0] - picked), "data")


def data_apart(weights, head, x, labels):
    """Manual over the data alone: XLA splits the rest."""
    logits = layers(jax.nn.gelu, weights, x) @ head
    picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    return jax.lax.pmean(jnp.mean(jax.nn.logsumexp(logits, -1) - picked), "data")


BOTH, ROW = P(("data", "model")), P("data")
COLUMNS = {"up": P(None, None, "model"), "down": P(None, "model")}
CASES = {
    "relu": (functools.partial(examples_apart, jax.nn.relu), P(), P(), BOTH, {}),
    "log_sigmoid": (functools.partial(examples_apart, jax.nn.log_sigmoid), P(), P(), BOTH, {}),
    "words in a loop": (
        functools.partial(words_apart, layers),
        COLUMNS,
        P(None, "model"),
        ROW,
        {},
    ),
    "words unrolled": (
        functools.partial(words_apart, unrolled),
        COLUMNS,
        P(None, "model"),
        ROW,
        {},
    ),
    "data": (data_apart, P(), P(), ROW, {"axis_names": {"data"}}),
}


FEW = [("data", 0.25), ("words unrolled", 0.25), ("relu", 0.25), ("log_sigmoid", 0.25)]
MORE = [(name, share) for share in (0.1, 0.5, 0.25) for name in CASES]


@pytest.mark.slow(after=2, every=True)
@pytest.mark.exhaustive(after=5)
@pytest.mark.parametrize(("name", "share"), [*FEW, *(each for each in MORE if each not in FEW)])
def test_a_plan_is_found_and_has_the_same_gradients(name, share):
    part, weights, head, rows, options = CASES[name]
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    loss = jax.shard_map(
        part, mesh=mesh, in_specs=(weights, head, rows, rows), out_specs=P(), **options
    )

    def put(tree, specs):
        if isinstance(specs, P):
            specs = jax.tree.map(lambda _: specs, tree)
        place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
        return jax.tree.map(place, tree, specs)

    args = put(WEIGHTS, weights), put(HEAD, head), put(X, rows), put(LABELS, rows)
    gradient = lambda fn: jax.jit(jax.value_and_grad(fn, (0, 1)))  # noqa: E731
    memory = jrc.explain(loss, *args, argnums=(0, 1)).memory
    budget = memory.peak - int((1 - share) * memory.temporaries)
    try:
        plan = jrc.plan(loss, *args, budget=budget, argnums=(0, 1))
        assert plan.verified.peak_bytes <= budget
    except jrc.BudgetError as error:
        plan = error.plan
    plain, planned = gradient(loss)(*args), gradient(plan.apply(loss))(*args)
    for a, b in zip(*map(jax.tree.leaves, (plain, planned)), strict=True):
        assert float(jnp.max(jnp.abs(a - b))) <= 1e-5 * float(jnp.max(jnp.abs(a)))
