"""Decoders of `jax.nn.dot_product_attention` and flax's modules under losses of optax."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from tests.zoo.plain_transformers import drawn, tokens
from tests.zoo.program import Program, Remat, wrapped


class _Block(nn.Module):
    """Grouped-query attention, its scores capped or with a bias for distance; a gated MLP."""

    heads: int
    groups: int
    cap: float = 0.0
    alibi: bool = False

    @nn.compact
    def __call__(self, x: Any) -> Any:
        batch, length, width = x.shape
        size = width // self.heads
        y = nn.RMSNorm()(x)
        q = nn.DenseGeneral((self.groups, self.heads // self.groups, size), use_bias=False)(y)
        k, v = (nn.DenseGeneral((self.groups, size), use_bias=False)(y) for _ in range(2))
        scores = jnp.einsum("bqghd,bkgd->bghqk", q, k) / size**0.5
        if self.cap:
            scores = self.cap * jnp.tanh(scores / self.cap)
        distance = jnp.arange(length)[:, None] - jnp.arange(length)
        if self.alibi:
            slopes = 2.0 ** (-8 * (1 + jnp.arange(self.heads)) / self.heads)
            bias = -slopes.reshape(self.groups, -1, 1, 1) * distance
            scores = scores + bias
        weights = jax.nn.softmax(jnp.where(distance >= 0, scores, -1e9), axis=-1)
        y = jnp.einsum("bghqk,bkgd->bqghd", weights, v).reshape(x.shape)
        x = x + nn.Dense(width, use_bias=False)(y)
        y = nn.RMSNorm()(x)
        gate, up = (nn.Dense(4 * width, use_bias=False)(y) for _ in range(2))
        return x + nn.Dense(width, use_bias=False)(nn.silu(gate) * up)


class _Decoder(nn.Module):
    """Embedding, blocks, and a head that is the embedding."""

    size: Any
    block: Any
    cap: float
    scanned: bool

    @nn.compact
    def __call__(self, batch: Any) -> Any:
        size = dict(self.size)
        embed = nn.Embed(size["vocabulary"], size["width"])
        x = embed(batch)
        if self.scanned:
            scan = nn.scan(
                lambda block, x, _: (block(x), None), variable_axes={"params": 0},
                split_rngs={"params": True}, length=size["layers"],
            )  # fmt: skip
            x, _ = scan(self.block(name="blocks"), x, None)
        else:
            for i in range(size["layers"]):
                x = self.block(name=f"block_{i}")(x)
        logits = embed.attend(nn.RMSNorm()(x))
        return self.cap * jnp.tanh(logits / self.cap) if self.cap else logits


def _decoder(toy: bool, scanned: bool = False, final: float = 0.0, **options: Any) -> Program:
    size = (
        dict(layers=2, width=32, batch=2, length=16, vocabulary=64)
        if toy
        else dict(layers=6, width=256, batch=4, length=256, vocabulary=32_000)
    )
    batch = tokens(size)

    def net_of(remat: Remat) -> Any:
        kind = _Block if remat is None else nn.remat(_Block, **remat)

        def block(name: str) -> Any:
            return kind(heads=8, groups=2, name=name, **options)

        return _Decoder(tuple(size.items()), block, final, scanned)

    params = net_of(None).init(jax.random.key(0), batch[:, :-1])

    def build(remat: Remat) -> Any:
        net = net_of(remat)

        def loss(params: Any, batch: Any) -> Any:
            logits = net.apply(params, batch[:, :-1])
            return optax.losses.softmax_cross_entropy_with_integer_labels(
                logits, batch[:, 1:]
            ).mean()

        return loss

    return Program(build, (params, batch))


def decoder_softcap(toy: bool) -> Program:
    """Grouped queries, caps on scores and logits, as Gemma 2 has them."""
    return _decoder(toy, cap=50.0, final=30.0)


def decoder_alibi(toy: bool) -> Program:
    """Grouped queries with a bias for distance (ALiBi)."""
    return _decoder(toy, alibi=True)


def decoder_scanned(toy: bool) -> Program:
    """The same with a cap, its blocks in one `nn.scan`."""
    return _decoder(toy, scanned=True, cap=50.0)


def hidden_loss(toy: bool) -> Program:
    """optax's label smoothing and cross-entropy over a vocabulary of 64,000."""
    count, width, vocabulary = (16, 8, 64) if toy else (1024, 256, 64_000)
    head, x = drawn(vocabulary, width), drawn(count, width)
    labels = tokens(dict(vocabulary=vocabulary, batch=1, length=count - 1))[0]

    def build(remat: Remat) -> Any:
        def of(head: Any, x: Any, labels: Any) -> Any:
            smooth = optax.losses.smooth_labels(jax.nn.one_hot(labels, vocabulary), 0.1)
            return optax.losses.safe_softmax_cross_entropy(x @ head.T, smooth).mean()

        return wrapped(of, remat)

    return Program(build, (head, x, labels), argnums=(0, 1))
