"""Transformers in plain JAX whose blocks read values that are made once."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.zoo.program import Program, Remat, wrapped


def sizes(toy: bool) -> dict[str, int]:
    """Return layers, width, heads, batch, length, and number of tokens."""
    if toy:
        return dict(layers=4, width=32, heads=2, batch=4, length=32, vocabulary=64)
    return dict(layers=8, width=256, heads=4, batch=8, length=128, vocabulary=512)


def drawn(*shape: int, seed: int = 0) -> jax.Array:
    """Return a weight."""
    draw = np.random.default_rng([seed, *shape])
    return jnp.asarray(draw.standard_normal(shape) / np.sqrt(shape[0]), jnp.float32)


def tokens(size: dict[str, int]) -> jax.Array:
    """Return a batch of tokens, one more than the length."""
    draw = np.random.default_rng(0)
    return jnp.asarray(
        draw.integers(0, size["vocabulary"], (size["batch"], size["length"] + 1)), jnp.int32
    )


def block_params(width: int, seed: int, cross: bool = False) -> dict[str, Any]:
    """Return the weights of one block."""
    names = ["q", "k", "v", "o"] + (["cq", "ck", "cv", "co"] if cross else [])
    found = {name: drawn(width, width, seed=seed + i) for i, name in enumerate(names)}
    return found | {
        "up": drawn(width, 4 * width, seed=seed + 8),
        "down": drawn(4 * width, width, seed=seed + 9),
    }


def params_of(size: dict[str, int], **more: Any) -> dict[str, Any]:
    """Return the weights of a transformer."""
    width, vocabulary = size["width"], size["vocabulary"]
    return {
        "embed": drawn(vocabulary, width),
        "blocks": [block_params(width, 10 * i) for i in range(size["layers"])],
        "head": drawn(width, vocabulary, seed=7),
    } | more


def norm(x: jax.Array) -> jax.Array:
    """Normalise the last axis."""
    mean = jnp.mean(x, axis=-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(jnp.var(x, axis=-1, keepdims=True) + 1e-5)


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    """Return [batch, heads, length, width of a head]."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], heads, -1), 2, 1)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Return softmax attention, [batch, length, width]."""
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(q.shape[-1])
    if mask is not None:
        scores = jnp.where(mask[:, None], scores, -1e9)
    out = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), v)
    return jnp.moveaxis(out, 1, 2).reshape(out.shape[0], out.shape[2], -1)


def causal(size: dict[str, int]) -> jax.Array:
    """Return the mask of all blocks, [batch, length, length]."""
    length = size["length"]
    return jnp.broadcast_to(
        jnp.tril(jnp.ones((length, length), bool)), (size["batch"], length, length)
    )


def rotary_tables(size: dict[str, int]) -> tuple[jax.Array, jax.Array]:
    """Return sine and cosine, [1, 1, length, half the width of a head]."""
    half = size["width"] // size["heads"] // 2
    rates = 10000.0 ** (-jnp.arange(half) / half)
    angles = (jnp.arange(size["length"])[:, None] * rates[None, :])[None, None]
    return jnp.sin(angles), jnp.cos(angles)


def rotated(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate pairs of features by position."""
    sin, cos = tables
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def feed_forward(p: Any, x: jax.Array) -> jax.Array:
    """Return the MLP of a block, before the residual sum."""
    return jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]


def block(p: Any, x: jax.Array, mask: Any, tables: Any = None, *, heads: int) -> jax.Array:
    """Run one block."""
    y = norm(x)
    q, k, v = (split_heads(y @ p[name], heads) for name in "qkv")
    if tables is not None:
        q, k = rotated(q, tables), rotated(k, tables)
    x = x + attend(q, k, v, mask) @ p["o"]
    return x + feed_forward(p, x)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean of the negative log-likelihoods."""
    logs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logs, labels[..., None], axis=-1))


def masked_transformer(toy: bool) -> Program:
    """A causal mask that is made once, and read by every block."""
    size = sizes(toy)

    def build(remat: Remat) -> Any:
        run = wrapped(functools.partial(block, heads=size["heads"]), remat)

        def loss(params: Any, batch: Any) -> Any:
            mask, x = causal(size), params["embed"][batch[:, :-1]]
            for p in params["blocks"]:
                x = run(p, x, mask)
            return cross_entropy(norm(x) @ params["head"], batch[:, 1:])

        return loss

    return Program(build, (params_of(size), tokens(size)))


def rotary_transformer(toy: bool) -> Program:
    """Rotary tables and a mask that every block reads."""
    size = sizes(toy)

    def build(remat: Remat) -> Any:
        run = wrapped(functools.partial(block, heads=size["heads"]), remat)

        def loss(params: Any, batch: Any) -> Any:
            mask, tables = causal(size), rotary_tables(size)
            x = params["embed"][batch[:, :-1]]
            for p in params["blocks"]:
                x = run(p, x, mask, tables)
            return cross_entropy(norm(x) @ params["head"], batch[:, 1:])

        return loss

    return Program(build, (params_of(size), tokens(size)))


def tied_gpt(toy: bool) -> Program:
    """A GPT whose head is its embedding, with learned positions."""
    size = sizes(toy)
    params = params_of(size, positions=drawn(size["length"], size["width"]))
    del params["head"]

    def build(remat: Remat) -> Any:
        run = wrapped(functools.partial(block, heads=size["heads"]), remat)

        def loss(params: Any, batch: Any) -> Any:
            mask = causal(size)
            x = params["embed"][batch[:, :-1]] + params["positions"][None]
            for p in params["blocks"]:
                x = run(p, x, mask)
            return cross_entropy(norm(x) @ params["embed"].T, batch[:, 1:])

        return loss

    return Program(build, (params, tokens(size)))


def bf16_gpt(toy: bool) -> Program:
    """A GPT in bfloat16, with parameters of float32 that are cast in the loss."""
    size = sizes(toy)

    def build(remat: Remat) -> Any:
        run = wrapped(functools.partial(block, heads=size["heads"]), remat)

        def loss(params: Any, batch: Any) -> Any:
            params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
            mask, x = causal(size), params["embed"][batch[:, :-1]]
            for p in params["blocks"]:
                x = run(p, x, mask)
            return cross_entropy(norm(x) @ params["head"], batch[:, 1:])

        return loss

    return Program(build, (params_of(size), tokens(size)), tolerance=2e-2)


def encoder_decoder(toy: bool) -> Program:
    """A decoder whose blocks all read the encoder's result."""
    size = sizes(toy)
    size["layers"] //= 2
    heads, width = size["heads"], size["width"]
    params = params_of(size)
    params["decoder"] = [block_params(width, 500 + 10 * i, True) for i in range(size["layers"])]

    def decode(p: Any, x: Any, memory: Any, mask: Any) -> Any:
        y = norm(x)
        q, k, v = (split_heads(y @ p[name], heads) for name in "qkv")
        x = x + attend(q, k, v, mask) @ p["o"]
        q = split_heads(norm(x) @ p["cq"], heads)
        k, v = (split_heads(memory @ p[name], heads) for name in ("ck", "cv"))
        x = x + attend(q, k, v, None) @ p["co"]
        return x + feed_forward(p, x)

    def build(remat: Remat) -> Any:
        encode = wrapped(functools.partial(block, heads=heads), remat)
        decoded = wrapped(decode, remat)

        def loss(params: Any, source: Any, batch: Any) -> Any:
            mask, memory = causal(size), params["embed"][source]
            for p in params["blocks"]:
                memory = encode(p, memory, None)
            memory, x = norm(memory), params["embed"][batch[:, :-1]]
            for p in params["decoder"]:
                x = decoded(p, x, memory, mask)
            return cross_entropy(norm(x) @ params["head"], batch[:, 1:])

        return loss

    batch = tokens(size)
    return Program(build, (params, batch[:, 1:], batch))


def moe_shared_router(toy: bool) -> Program:
    """A mixture of experts whose routing is decided once, and read by every block."""
    size = sizes(toy)
    heads, width, experts = size["heads"], size["width"], 4
    params = params_of(size, router=drawn(width, experts))
    for i, p in enumerate(params["blocks"]):
        p["up"] = jnp.stack([drawn(width, 2 * width, seed=100 * i + e) for e in range(experts)])
        p["down"] = jnp.stack([drawn(2 * width, width, seed=100 * i + e) for e in range(experts)])

    def moe(p: Any, x: Any, mask: Any, gates: Any) -> Any:
        y = norm(x)
        q, k, v = (split_heads(y @ p[name], heads) for name in "qkv")
        x = x + attend(q, k, v, mask) @ p["o"]
        hidden = jax.nn.gelu(jnp.einsum("bld,edh->belh", norm(x), p["up"]))
        return x + jnp.einsum("belh,ehd,ble->bld", hidden, p["down"], gates)

    def build(remat: Remat) -> Any:
        run = wrapped(moe, remat)

        def loss(params: Any, batch: Any) -> Any:
            mask, x = causal(size), params["embed"][batch[:, :-1]]
            scores = jax.nn.softmax(x @ params["router"])
            best = jax.lax.top_k(scores, 2)[0][..., -1:]
            gates = jnp.where(scores >= best, scores, 0.0)
            for p in params["blocks"]:
                x = run(p, x, mask, gates)
            return cross_entropy(norm(x) @ params["head"], batch[:, 1:])

        return loss

    return Program(build, (params, tokens(size)))


def scanned_gpt(toy: bool) -> Program:
    """Blocks as one `lax.scan`, with a shared mask."""
    size = sizes(toy)
    params = params_of(size)
    params["blocks"] = jax.tree.map(lambda *xs: jnp.stack(xs), *params["blocks"])

    def build(remat: Remat) -> Any:
        options = None if remat is None else {**remat, "prevent_cse": False}

        def loss(params: Any, batch: Any) -> Any:
            mask, x = causal(size), params["embed"][batch[:, :-1]]
            body = wrapped(lambda x, p: (block(p, x, mask, heads=size["heads"]), None), options)
            x, _ = jax.lax.scan(body, x, params["blocks"])
            return cross_entropy(norm(x) @ params["head"], batch[:, 1:])

        return loss

    return Program(build, (params, tokens(size)))
