"""A Llama-shaped language model in flax nnx: rotary attention with grouped keys, gated MLPs.

Not run by itself; `finetune_llm.py` and `docs/finetune_llm.ipynb` import it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx


@dataclasses.dataclass(frozen=True)
class Config:
    vocabulary: int = 256  # bytes
    layers: int = 4
    width: int = 128
    heads: int = 4
    key_heads: int = 2  # each is read by heads / key_heads queries


def rotary(length, size):
    """Return sine and cosine of the rotary angles, float32 (1, length, 1, size / 2)."""
    rates = 10_000.0 ** (-jnp.arange(size // 2) / (size // 2))
    angles = jnp.outer(jnp.arange(length), rates)[None, :, None]
    return jnp.sin(angles), jnp.cos(angles)


def rotated(x, tables):
    """Rotate queries or keys, (batch, length, heads, size), by their positions."""
    (sin, cos), (a, b) = tables, jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Block(nnx.Module):
    def __init__(self, config, *, rngs):
        def linear(inputs, outputs):
            return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs)

        width, self.size = config.width, config.width // config.heads
        self.norm, self.mlp_norm = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.query, self.out = linear(width, width), linear(width, width)
        self.key = linear(width, config.key_heads * self.size)
        self.value = linear(width, config.key_heads * self.size)
        self.gate, self.up = linear(width, 3 * width), linear(width, 3 * width)
        self.down = linear(3 * width, width)

    def __call__(self, x, tables):
        def heads(y):
            return y.reshape(*y.shape[:2], -1, self.size)

        y = self.norm(x)
        query, key = (rotated(heads(each(y)), tables) for each in (self.query, self.key))
        y = jax.nn.dot_product_attention(query, key, heads(self.value(y)), is_causal=True)
        x = x + self.out(y.reshape(x.shape))
        y = self.mlp_norm(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Llama(nnx.Module):
    def __init__(self, config, *, rngs):
        self.size = config.width // config.heads
        self.embed = nnx.Embed(config.vocabulary, config.width, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)

    def __call__(self, tokens):
        x, tables = self.embed(tokens), rotary(tokens.shape[1], self.size)
        for block in self.blocks:
            x = block(x, tables)
        return self.embed.attend(self.norm(x))


def cross_entropy(logits, tokens):
    """Return the mean loss of the next token, in nats; logits are those of `tokens[:, :-1]`."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))


def llama(config, seed):
    """Return `loss_fn(params, batch, key)` and initial parameters."""
    graph, params = nnx.split(Llama(config, rngs=nnx.Rngs(seed)))

    def loss_fn(params, batch, key):
        del key  # no dropout
        model = nnx.merge(graph, params, copy=True)
        return cross_entropy(model(batch[:, :-1]), batch)

    return loss_fn, params
