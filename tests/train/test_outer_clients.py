"""Models of flax nnx and equinox whose replicas are split and exchange in rounds."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jrc
from tests.train.test_meshes import mesh_of

WIDTH, HEADS, TOKENS, LENGTH = 32, 4, 64, 16


def tokens(i, count=8):
    draw = np.random.default_rng(i).integers(0, TOKENS // 4, (count, 1))
    return ((draw + np.arange(LENGTH + 1)) % TOKENS).astype(np.int32)


def train(params, loss, mesh, outer, steps=8):
    """Losses of the replicas in each step, and the last state."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    on = {"mesh": mesh, "axis_name": "replica", "outer": outer}
    state = jrc.init_state(params, tx, jax.random.key(0), **on)
    step = jrc.make_train_step(loss, tx, **on)
    losses, rows = [], NamedSharding(mesh, P(("replica", "fsdp")))
    for i in range(steps):
        state, info = step(state, jax.device_put(tokens(i), rows))
        losses.append(float(info.losses.mean()))
    assert bool(info.synchronised) and int(info.left_out) == 0
    return losses, state


@pytest.mark.exhaustive
def test_a_flax_nnx_llama_with_its_partition_specs():
    from flax import nnx

    draw = nnx.initializers.normal(0.1)
    into = nnx.with_partitioning(draw, ("fsdp", "model"))
    back = nnx.with_partitioning(draw, ("model", "fsdp"))

    class Block(nnx.Module):
        """Rotary attention and SwiGLU, each behind an RMS norm."""

        def __init__(self, rngs):
            linear = lambda n, m, how: nnx.Linear(  # noqa: E731
                n, m, use_bias=False, kernel_init=how, rngs=rngs
            )
            self.before, self.between = (nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2))
            self.qkv, self.out = linear(WIDTH, 3 * WIDTH, into), linear(WIDTH, WIDTH, back)
            self.gate, self.up = (linear(WIDTH, 2 * WIDTH, into) for _ in range(2))
            self.down = linear(2 * WIDTH, WIDTH, back)

        def __call__(self, x):
            q, k, v = jnp.split(self.qkv(self.before(x)), 3, -1)
            heads = [y.reshape(*y.shape[:2], HEADS, -1) for y in (q, k, v)]
            q, k = map(rotated, heads[:2])
            x = x + self.out(
                jax.nn.dot_product_attention(q, k, heads[2], is_causal=True).reshape(x.shape)
            )
            y = self.between(x)
            return x + self.down(nnx.silu(self.gate(y)) * self.up(y))

    class Llama(nnx.Module):
        def __init__(self, rngs):
            # A table that a lookup reads is split along the width (docs/meshes.md).
            table = nnx.with_partitioning(draw, (None, ("fsdp", "model")))
            self.table = nnx.Embed(TOKENS, WIDTH, embedding_init=table, rngs=rngs)
            self.blocks = nnx.List([Block(rngs)])
            self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

        def __call__(self, x):
            x = self.table(x)
            for block in self.blocks:
                x = block(x)
            return self.table.attend(self.norm(x))

    mesh = mesh_of(2, 2, 2)
    with jax.set_mesh(mesh):
        graph, params = nnx.split(Llama(nnx.Rngs(0)))
    specs = nnx.as_pure(nnx.get_partition_spec(params))
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec or P()))  # noqa: E731
    params = jax.tree.map(place, nnx.as_pure(params), specs)

    def loss(params, batch, key):
        logits = nnx.merge(graph, params)(batch[:, :-1])
        # No lookup in logits that are split.
        wanted = jax.nn.one_hot(batch[:, 1:], TOKENS)
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * wanted, -1))

    losses, state = train(params, loss, mesh, jrc.SparseLoCo(4, density=1 / 4))
    assert losses[-1] < 0.8 * losses[0]
    own = state.opt_state.local
    kernel = lambda tree: tree["blocks"][0]["qkv"]["kernel"].sharding.spec  # noqa: E731
    assert kernel(own.params) == kernel(own.outer) == P("replica", "fsdp", "model")
    assert kernel(own.opt_state[1][0].mu) == P("replica", "fsdp", "model")


def rotated(x):
    angle = jnp.arange(x.shape[1])[:, None] * 10.0 ** -jnp.arange(x.shape[-1] // 2)[None]
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


@pytest.mark.parametrize("options", [{}, pytest.param({"accumulate": 2}, marks=pytest.mark.slow)])
def test_flax_nnx_dropout_and_batch_statistics_are_a_model_state(options):
    """Their variables change in the loss function: counters of keys, and running statistics."""
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.into = nnx.Linear(4, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.out = nnx.Linear(8, 1, rngs=rngs)

        def __call__(self, x):
            return self.out(self.drop(nnx.relu(self.norm(self.into(x)))))

    graph, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, rest, batch, key):
        net = nnx.merge(graph, params, rest)
        value = jnp.mean((net(batch) - 1.0) ** 2)
        return value, (nnx.state(net, nnx.Not(nnx.Param)), None)

    mesh = mesh_of(8)
    on = {"mesh": mesh, "axis_name": "fsdp"}
    state = jrc.init_state(params, optax.sgd(0.1), jax.random.key(0), model_state=rest, **on)
    step = jrc.make_train_step(loss, optax.sgd(0.1), **on, **options)
    batch = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    for _ in range(3):
        state, info = step(state, batch)
    used = nnx.merge(graph, state.params, state.model_state)
    assert int(used.drop.rngs.count[...]) == 3 * options.get("accumulate", 1)
    assert np.isfinite(info.loss) and not np.allclose(used.norm.var[...], 1.0)


@pytest.mark.exhaustive
def test_an_equinox_model_that_is_sharded():
    eqx = pytest.importorskip("equinox")
    mesh = mesh_of(2, 2, 2)
    model = eqx.nn.MLP(TOKENS, TOKENS, 64, 2, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_array)

    def split(x):
        return eqx.filter_shard(x, NamedSharding(mesh, P("model", "fsdp") if x.ndim == 2 else P()))

    def loss(params, batch, key):
        x, y = jax.nn.one_hot(batch[:, :-1], TOKENS), jax.nn.one_hot(batch[:, 1:], TOKENS)
        logits = jax.vmap(jax.vmap(eqx.combine(params, static)))(x)
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * y, -1))

    outer = jrc.DiLoCo(4, fragments=2, overlap=1)
    losses, state = train(jax.tree.map(split, arrays), loss, mesh, outer, steps=9)
    assert losses[-1] < 0.8 * losses[0]
    weight = state.opt_state.local.params.layers[0].weight
    assert weight.sharding.spec == P("replica", "model", "fsdp")
