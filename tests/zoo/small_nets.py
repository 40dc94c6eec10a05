"""Small nets in plain JAX, each with one thing that a plan must get right.

Several towers, particles, losses over pairs, normalisation, convolutions, gathers. They are planned
by `benchmarks.memory.zoo`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.zoo.plain_nets import conv, kernel
from tests.zoo.plain_transformers import cross_entropy, drawn, norm
from tests.zoo.program import Program, Remat, wrapped


def two_towers(toy: bool) -> Program:
    """Two MLPs and a contrastive loss over all pairs of a batch."""
    batch, width, layers = (32, 16, 3) if toy else (4096, 1024, 4)
    params = [[drawn(width, width, seed=10 * t + i) for i in range(layers)] for t in range(2)]
    step = _dense(jax.nn.gelu)

    def build(remat: Remat) -> Any:
        run = wrapped(step, remat)

        def loss(params: Any, images: Any, texts: Any) -> Any:
            a, b = (
                _unit(_through(run, ws, x)) for ws, x in zip(params, (images, texts), strict=True)
            )
            scores = 20.0 * a @ b.T
            own = jnp.diagonal(scores)
            rows, columns = (jax.nn.logsumexp(scores, axis=axis) for axis in (0, 1))
            return jnp.mean(rows + columns - 2 * own)

        return loss

    return Program(build, (params, drawn(batch, width), drawn(batch, width, seed=1)))


def actor_critic(toy: bool) -> Program:
    """An actor and a critic, MLPs of four and five layers that read the same observations."""
    batch, width, actions = (32, 16, 2) if toy else (8192, 1024, 16)
    params = {
        "actor": [drawn(width, width, seed=i) for i in range(4)],
        "critic": [drawn(width, width, seed=10 + i) for i in range(5)],
        "mean": drawn(width, actions),
        "value": drawn(width, 1),
    }
    step = _dense(jax.nn.silu)

    def build(remat: Remat) -> Any:
        run = wrapped(step, remat)

        def loss(params: Any, seen: Any, acted: Any, returns: Any) -> Any:
            value = (_through(run, params["critic"], seen) @ params["value"])[:, 0]
            mean = _through(run, params["actor"], seen) @ params["mean"]
            gain = jax.lax.stop_gradient(returns - value)
            log_prob = -jnp.sum((acted - mean) ** 2, axis=-1) / 2
            return jnp.mean((returns - value) ** 2) - jnp.mean(gain * log_prob)

        return loss

    args = (params, drawn(batch, width), drawn(batch, actions), drawn(1, batch)[0])
    return Program(build, args)


def particle_vae(toy: bool) -> Program:
    """A variational autoencoder whose loss is the mean over four mapped particles."""
    batch, pixels, width, latent = (32, 32, 16, 4) if toy else (2048, 784, 512, 32)
    params = {
        "in": [drawn(pixels, width), drawn(width, width), drawn(width, 2 * latent)],
        "out": [drawn(latent, width), drawn(width, width, seed=1), drawn(width, pixels)],
    }
    step = _dense(jax.nn.softplus)

    def build(remat: Remat) -> Any:
        run = wrapped(step, remat)

        def loss(params: Any, data: Any, key: Any) -> Any:
            def particle(key: Any) -> Any:
                *encoder, last = params["in"]
                mean, log_scale = jnp.split(_through(run, encoder, data) @ last, 2, axis=-1)
                drawn_noise = jax.random.normal(key, mean.shape)
                *decoder, last = params["out"]
                logits = _through(run, decoder, mean + jnp.exp(log_scale) * drawn_noise) @ last
                fit = jnp.sum(data * logits - jax.nn.softplus(logits), axis=-1)
                prior = mean**2 + jnp.exp(2 * log_scale) - 2 * log_scale - 1
                return jnp.mean(jnp.sum(prior, axis=-1) / 2 - fit)

            return jnp.mean(jax.vmap(particle)(jax.random.split(key, 4)))

        return loss

    data = (drawn(batch, pixels) > 0).astype(jnp.float32)
    return Program(build, (params, data, jax.random.key(0)))


def group_norm_convs(toy: bool) -> Program:
    """Residual convolutions with group normalisation and silu."""
    batch, side, width, layers = (4, 8, 8, 3) if toy else (32, 32, 128, 6)
    params = [(kernel(width, width, i), jnp.ones(width), jnp.zeros(width)) for i in range(layers)]

    def step(p: Any, x: Any) -> Any:
        w, scale, shift = p
        groups = norm(
            jnp.moveaxis(x.reshape(batch, side * side, 8, -1), 2, 1).reshape(batch, 8, -1)
        )
        y = jnp.moveaxis(groups.reshape(batch, 8, side * side, -1), 1, 2).reshape(x.shape)
        return x + conv(w, jax.nn.silu(y * scale[None, None, None] + shift[None, None, None]))

    return _blocks(step, params, drawn(batch, side, side, width), lambda x: jnp.mean(x**2))


def batch_norm_convs(toy: bool) -> Program:
    """Convolutions, each normalised over the batch, with strides in between."""
    batch, side, width = (4, 8, 8) if toy else (64, 64, 32)
    widths = [width, width, 2 * width, 2 * width, 4 * width, 4 * width]
    pairs = list(zip([width, *widths], widths, strict=False))
    params = [(kernel(a, b, i), jnp.ones(b)) for i, (a, b) in enumerate(pairs)]

    def step(p: Any, x: Any) -> Any:
        w, scale = p
        y = conv(w, x, stride=1 if w.shape[2] == w.shape[3] else 2)
        mean = jnp.mean(y, axis=(0, 1, 2), keepdims=True)
        var = jnp.mean((y - mean) ** 2, axis=(0, 1, 2), keepdims=True)
        return jax.nn.relu((y - mean) * jax.lax.rsqrt(var + 1e-5) * scale[None, None, None])

    return _blocks(step, params, drawn(batch, side, side, width), lambda x: jnp.mean(x**2))


def gated_mlp(toy: bool) -> Program:
    """Residual gated MLPs behind RMS normalisation, in bfloat16 with float32 weights."""
    tokens, width, layers = (32, 16, 3) if toy else (8192, 512, 6)
    params = [
        (jnp.ones(width), *(drawn(width, 3 * width, seed=2 * i + j) for j in (0, 1)),
         drawn(3 * width, width, seed=i))
        for i in range(layers)
    ]  # fmt: skip

    def step(p: Any, x: Any) -> Any:
        scale, gate, up, down = (w.astype(jnp.bfloat16) for w in p)
        square = jnp.mean(x.astype(jnp.float32) ** 2, axis=-1, keepdims=True)
        y = (x * jax.lax.rsqrt(square + 1e-6)).astype(jnp.bfloat16) * scale[None]
        return x + (jax.nn.silu(y @ gate) * (y @ up)) @ down

    x = drawn(tokens, width).astype(jnp.bfloat16)
    return _blocks(step, params, x, lambda x: jnp.mean(x.astype(jnp.float32) ** 2), 2e-2)


def triplets(toy: bool) -> Program:
    """One encoder that is called three times, and a loss of triplets."""
    batch, width, layers = (32, 16, 3) if toy else (4096, 512, 5)
    params = [drawn(width, width, seed=i) for i in range(layers)]
    step = _dense(jnp.tanh)

    def build(remat: Remat) -> Any:
        run = wrapped(step, remat)

        def loss(params: Any, *inputs: Any) -> Any:
            anchor, same, other = (_unit(_through(run, params, x)) for x in inputs)
            near, far = jnp.sum((anchor - same) ** 2, -1), jnp.sum((anchor - other) ** 2, -1)
            return jnp.mean(jax.nn.relu(near - far + 0.2))

        return loss

    return Program(build, (params, *(drawn(batch, width, seed=i) for i in range(3))))


def deep_sets(toy: bool) -> Program:
    """An MLP for each element of a set, its sums through another, a distribution for each set."""
    batch, size, width, parts = (8, 8, 16, 3) if toy else (512, 64, 256, 8)
    params = {
        "each": [drawn(width, width, seed=i) for i in range(4)],
        "all": [drawn(width, width, seed=10 + i) for i in range(2)],
        "head": drawn(width, 3 * parts),
    }
    step = _dense(jax.nn.gelu)

    def build(remat: Remat) -> Any:
        run = wrapped(step, remat)

        def loss(params: Any, elements: Any, target: Any) -> Any:
            x = _through(run, params["each"], elements) / size
            out = _through(run, params["all"], jnp.sum(x, axis=1)) @ params["head"]
            weight, mean, log_scale = jnp.split(out, 3, axis=-1)
            z = (target[:, None] - mean) * jnp.exp(-log_scale)
            log_prob = jax.nn.log_softmax(weight) - z**2 / 2 - log_scale
            return -jnp.mean(jax.nn.logsumexp(log_prob, axis=-1))

        return loss

    return Program(build, (params, drawn(batch, size, width), drawn(1, batch)[0]))


def graph_net(toy: bool) -> Program:
    """Messages along the edges of a graph: gathers, an MLP for each edge, sums at the nodes."""
    nodes, edges, width, layers = (16, 64, 8, 3) if toy else (4096, 32768, 128, 5)
    draw = np.random.default_rng(0)
    sends, gets = (jnp.asarray(draw.integers(0, nodes, edges), jnp.int32) for _ in range(2))
    params = [
        (drawn(2 * width, width, seed=i), drawn(2 * width, width, seed=50 + i))
        for i in range(layers)
    ]

    def step(p: Any, x: Any) -> Any:
        message = jax.nn.silu(jnp.concatenate([x[sends], x[gets]], axis=-1) @ p[0])
        total = jax.ops.segment_sum(message, gets, nodes)
        return x + jnp.tanh(jnp.concatenate([x, total], axis=-1) @ p[1])

    return _blocks(step, params, drawn(nodes, width), lambda x: jnp.mean(x**2))


def conv_autoencoder(toy: bool) -> Program:
    """Convolutions with strides, transposed ones back, and the error of each pixel."""
    batch, side, width = (4, 16, 4) if toy else (64, 64, 32)
    widths = [3, width, 2 * width, 4 * width]
    pairs = list(zip(widths, widths[1:], strict=False))
    down = [kernel(a, b, i) for i, (a, b) in enumerate(pairs)]
    up = [kernel(b, a, 10 + i) for i, (a, b) in reversed(list(enumerate(pairs)))]

    def encode(w: Any, x: Any) -> Any:
        return jax.nn.gelu(norm(conv(w, x, stride=2)))

    def decode(w: Any, x: Any) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=numbers)

    def build(remat: Remat) -> Any:
        into = wrapped(encode, remat)
        back = wrapped(lambda w, x: decode(w, jax.nn.gelu(x)), remat)

        def loss(params: Any, image: Any) -> Any:
            x = _through(back, params[1], _through(into, params[0], image))
            return jnp.mean((x - image) ** 2)

        return loss

    return Program(build, ((down, up), drawn(batch, side, side, 3)))


def latent_attention(toy: bool) -> Program:
    """A few latent vectors that attend to many inputs, layer after layer."""
    batch, length, few, width, layers = (2, 32, 4, 16, 2) if toy else (8, 2048, 256, 256, 4)
    params = {
        "latents": drawn(few, width),
        "layers": [
            [drawn(width, width, seed=10 * i + j) for j in range(4)]
            + [drawn(width, 4 * width, seed=i), drawn(4 * width, width, seed=i)]
            for i in range(layers)
        ],
    }

    def step(p: Any, x: Any, inputs: Any) -> Any:
        q, k, v, o, wide, narrow = p
        y = norm(inputs)
        scores = jnp.einsum("bqd,bkd->bqk", norm(x) @ q, y @ k) / np.sqrt(width)
        x = x + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), y @ v) @ o
        return x + jax.nn.gelu(norm(x) @ wide) @ narrow

    def build(remat: Remat) -> Any:
        run = wrapped(step, remat)

        def loss(params: Any, inputs: Any) -> Any:
            x = jnp.broadcast_to(params["latents"], (batch, few, width))
            for p in params["layers"]:
                x = run(p, x, inputs)
            return jnp.mean(x**2)

        return loss

    return Program(build, (params, drawn(batch, length, width)))


def pooled_text(toy: bool) -> Program:
    """Embeddings, convolutions along a text, the largest entry of each channel, classes."""
    batch, length, width, words = (4, 16, 16, 64) if toy else (64, 512, 256, 8192)
    params = {
        "embed": drawn(words, width),
        "layers": [drawn(3 * width, width, seed=i) for i in range(5)],
        "head": drawn(width, 512),
    }

    def step(w: Any, x: Any) -> Any:
        around = jnp.pad(x, ((0, 0), (1, 1), (0, 0)))
        windows = jnp.concatenate([around[:, i : i + length] for i in range(3)], axis=-1)
        return x + jax.nn.relu(norm(windows @ w))

    def build(remat: Remat) -> Any:
        run = wrapped(step, remat)

        def loss(params: Any, text: Any, labels: Any) -> Any:
            x = _through(run, params["layers"], params["embed"][text])
            return cross_entropy(jnp.max(x, axis=1) @ params["head"], labels)

        return loss

    draw = np.random.default_rng(0)
    text = jnp.asarray(draw.integers(0, words, (batch, length)), jnp.int32)
    return Program(build, (params, text, jnp.arange(batch) % 512))


def _dense(activation: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """A layer of an MLP."""
    return lambda w, x: activation(x @ w)


def _through(step: Callable[[Any, Any], Any], params: Sequence[Any], x: Any) -> Any:
    for p in params:
        x = step(p, x)
    return x


def _unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(x**2, axis=-1, keepdims=True) + 1e-6)


def _blocks(
    step: Callable[[Any, Any], Any],
    params: Sequence[Any],
    x: jax.Array,
    end: Callable[[Any], Any],
    tolerance: float = 1e-5,
) -> Program:
    """The program of the same block again and again."""

    def build(remat: Remat) -> Any:
        run = wrapped(step, remat)
        return lambda params, x: end(_through(run, params, x))

    return Program(build, (list(params), x), tolerance=tolerance)
