"""Nets in plain JAX: skips over many blocks, a long loop, branches."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from tests.zoo.plain_transformers import block, cross_entropy, drawn, norm, params_of, sizes, tokens
from tests.zoo.program import Program, Remat, wrapped


def conv(w: jax.Array, x: jax.Array, stride: int = 1) -> jax.Array:
    """Return a convolution of [batch, height, width, channels]."""
    return jax.lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def kernel(inputs: int, outputs: int, seed: int = 0) -> jax.Array:
    """Return the weight of a convolution of 3 x 3."""
    return drawn(9 * inputs, outputs, seed=seed).reshape(3, 3, inputs, outputs)


def unet(toy: bool) -> Program:
    """A U-Net: each level's result is read again on the way up."""
    widths = [8, 16, 16] if toy else [32, 64, 128]
    side, batch = (16, 4) if toy else (64, 16)
    down = [(kernel(a, b), kernel(b, b, 1)) for a, b in zip([3, *widths], widths, strict=False)]
    pairs = zip(widths[:0:-1], widths[-2::-1], strict=True)
    up = [(kernel(a + b, b, 2), kernel(b, b, 3)) for a, b in pairs]
    params = {"down": down, "up": up, "head": kernel(widths[0], 3)}

    def twice(p: Any, x: Any) -> Any:
        for w in p:
            x = jax.nn.silu(norm(conv(w, x)))
        return x

    def climb(p: Any, x: Any, skip: Any) -> Any:
        x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
        return twice(p, jnp.concatenate([x, skip], axis=-1))

    def build(remat: Remat) -> Any:
        level, rise = wrapped(twice, remat), wrapped(climb, remat)

        def loss(params: Any, noisy: Any, clean: Any) -> Any:
            skips, x = [], noisy
            for i, p in enumerate(params["down"]):
                x = level(p, x[:, ::2, ::2] if i else x)
                skips.append(x)
            for p, skip in zip(params["up"], skips[-2::-1], strict=True):
                x = rise(p, x, skip)
            return jnp.mean((conv(params["head"], x) - clean) ** 2)

        return loss

    image = drawn(batch, side, side, 3)
    return Program(build, (params, image, image))


def densenet(toy: bool) -> Program:
    """Layers that read the results of all layers before them."""
    layers, growth, width = (6, 8, 16) if toy else (10, 32, 64)
    side, batch = (8, 4) if toy else (32, 16)
    params = {
        "stem": kernel(3, width),
        "layers": [kernel(width + i * growth, growth, i) for i in range(layers)],
        "head": drawn(width + layers * growth, 10),
    }

    def layer(w: Any, *before: Any) -> Any:
        return conv(w, jax.nn.relu(norm(jnp.concatenate(before, axis=-1))))

    def build(remat: Remat) -> Any:
        run = wrapped(layer, remat)

        def loss(params: Any, image: Any, labels: Any) -> Any:
            found = [conv(params["stem"], image)]
            for w in params["layers"]:
                found.append(run(w, *found))
            x = jnp.mean(jnp.concatenate(found, axis=-1), axis=(1, 2))
            return cross_entropy(x @ params["head"], labels)

        return loss

    return Program(build, (params, drawn(batch, side, side, 3), jnp.arange(batch) % 10))


def mirrored_mlp(toy: bool) -> Program:
    """An MLP with skips from its first half to the mirrored layer of the second."""
    half, width, batch = (4, 16, 128) if toy else (8, 512, 4096)
    params = [
        (drawn(width, 2 * width, seed=i), drawn(2 * width, width, seed=i)) for i in range(2 * half)
    ]

    def layer(p: Any, x: Any, skip: Any = None) -> Any:
        y = norm(x if skip is None else x + skip)
        return x + jnp.tanh(jax.nn.gelu(y @ p[0]) @ p[1])

    def build(remat: Remat) -> Any:
        run = wrapped(layer, remat)

        def loss(params: Any, x: Any) -> Any:
            skips = []
            for p in params[:half]:
                x = run(p, x)
                skips.append(x)
            for p in params[half:]:
                x = run(p, x, skips.pop())
            return jnp.mean(x**2)

        return loss

    return Program(build, (params, drawn(batch, width)))


def lstm_scan(toy: bool) -> Program:
    """An LSTM over 256 steps."""
    steps, width, batch = (64, 16, 8) if toy else (256, 128, 64)
    params = {
        "w": drawn(2 * width, 4 * width),
        "b": jnp.zeros(4 * width),
        "head": drawn(width, 1),
    }

    def step(params: Any, carry: Any, x: Any) -> Any:
        h, c = carry
        gates = jnp.concatenate([x, h], axis=-1) @ params["w"] + params["b"][None]
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    def build(remat: Remat, segments: int = 0) -> Any:
        options = None if remat is None else {**remat, "prevent_cse": False}

        def loss(params: Any, xs: Any, labels: Any) -> Any:
            carry = (jnp.zeros((batch, width)),) * 2
            body = wrapped(functools.partial(step, params), options)
            if segments:
                segment = jax.checkpoint(lambda c, xs: jax.lax.scan(body, c, xs), prevent_cse=False)
                parts = xs.reshape(segments, -1, *xs.shape[1:])
                _, hs = jax.lax.scan(segment, carry, parts)
                hs = hs.reshape(steps, batch, width)
            else:
                _, hs = jax.lax.scan(body, carry, xs)
            return jnp.mean(((hs @ params["head"])[..., 0] - labels) ** 2)

        return loss

    root = {"sqrt(N) segments": build(None, math.isqrt(steps))}
    return Program(build, (params, drawn(steps, batch, width), drawn(steps, batch)), ways=root)


def branches(toy: bool) -> Program:
    """Transformer blocks under a `lax.cond`: a block may be skipped (stochastic depth)."""
    size = sizes(toy)
    size["layers"] //= 2
    skipped = jnp.arange(size["layers"]) == 1

    def build(remat: Remat) -> Any:
        run = wrapped(functools.partial(block, heads=size["heads"]), remat)

        def loss(params: Any, batch: Any, skipped: Any) -> Any:
            x = params["embed"][batch[:, :-1]]
            for i, p in enumerate(params["blocks"]):
                x = jax.lax.cond(skipped[i], lambda p, x: x, lambda p, x: run(p, x, None), p, x)
            return cross_entropy(norm(x) @ params["head"], batch[:, 1:])

        return loss

    return Program(build, (params_of(size), tokens(size), skipped))


def own_checkpoints(toy: bool) -> Program:
    """Blocks that stand under the user's own `jax.checkpoint`, every other one with a policy."""
    size = sizes(toy)
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

    def build(remat: Remat, given: bool = True) -> Any:
        plain = functools.partial(block, heads=size["heads"])
        runs = [jax.checkpoint(plain), jax.checkpoint(plain, policy=policy)]
        if not given or remat is not None:
            runs = [wrapped(plain, remat)] * 2

        def loss(params: Any, batch: Any) -> Any:
            x = params["embed"][batch[:, :-1]]
            for i, p in enumerate(params["blocks"]):
                x = runs[i % 2](p, x, None)
            return cross_entropy(norm(x) @ params["head"], batch[:, 1:])

        return loss

    ways = {"without its checkpoints": build(None, False)}
    return Program(build, (params_of(size), tokens(size)), ways=ways)
