"""Built-in modules of flax nnx, passed whole: streams of keys and running means change in them."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tests.zoo.plain_transformers import causal, cross_entropy, drawn, sizes, tokens
from tests.zoo.program import Program, Remat


def wrapped(block: Any, remat: Remat) -> Any:
    """Return a function of a module, recomputed as `remat` says."""
    return block if remat is None else nnx.remat(block, **remat)


class Block(nnx.Module):
    """A block of built-in attention and dropout."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.norm, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: Any, mask: Any) -> Any:
        y = self.norm(x)
        x = x + self.dropout(self.attention(y, y, mask=mask))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm2(x)))))


class Transformer(nnx.Module):
    """A transformer."""

    def __init__(self, size: dict[str, int], rngs: nnx.Rngs):
        width = size["width"]
        self.embed = nnx.Embed(size["vocabulary"], width, rngs=rngs)
        self.blocks = nnx.List([Block(width, size["heads"], rngs) for _ in range(size["layers"])])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, size["vocabulary"], rngs=rngs)

    def __call__(self, batch: Any, mask: Any, remat: Remat) -> Any:
        x = self.embed(batch)
        for block in self.blocks:
            x = wrapped(lambda block, x, mask: block(x, mask), remat)(block, x, mask)
        return self.head(self.norm(x))


def _transformer(toy: bool, given: Remat, **ways: Remat) -> Program:
    size = sizes(toy)

    def build(remat: Remat, given: Remat = given) -> Any:
        chosen = given if remat is None else remat

        def loss(model: Any, batch: Any) -> Any:
            logits = model(batch[:, :-1], causal(size)[:, None], chosen)
            return cross_entropy(logits, batch[:, 1:])

        return loss

    model = Transformer(size, nnx.Rngs(0))
    others = {name: build(None, remat) for name, remat in ways.items()}
    return Program(build, (model, tokens(size)), ways=others, whole=_whole(build(None)))


def _whole(loss: Any) -> Any:
    return lambda remat: nnx.remat(loss, **(remat or {}))


def nnx_transformer(toy: bool) -> Program:
    """Layers in turn, with a shared mask and dropout."""
    return _transformer(toy, None)


def nnx_remat(toy: bool) -> Program:
    """The blocks stand under `nnx.remat` in the model."""
    return _transformer(toy, {}, **{"without nnx.remat": None})


class ConvBlock(nnx.Module):
    """Convolution and batch normalisation."""

    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs):
        self.conv = nnx.Conv(inputs, outputs, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(outputs, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return nnx.relu(self.norm(self.conv(x)))


def nnx_batchnorm(toy: bool) -> Program:
    """A convolutional net whose running means change in place."""
    layers, width, side, batch = (3, 8, 8, 8) if toy else (8, 64, 32, 32)
    rngs = nnx.Rngs(0)
    model = nnx.List([ConvBlock(width if i else 3, width, rngs) for i in range(layers)])

    def build(remat: Remat) -> Any:
        def loss(model: Any, images: Any, target: Any) -> Any:
            x = images
            for block in model:
                x = wrapped(lambda block, x: block(x), remat)(block, x)
            return jnp.mean((jnp.mean(x, axis=(1, 2)) - target) ** 2)

        return loss

    args = (model, drawn(batch, side, side, 3), drawn(batch, width))
    return Program(build, args, whole=_whole(build(None)), tolerance=1e-4)


def nnx_scan(toy: bool) -> Program:
    """Layers as one `nnx.scan` over stacked modules."""
    layers, width, batch = (4, 16, 256) if toy else (8, 256, 2048)

    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.norm = nnx.LayerNorm(width, rngs=rngs)
            self.up = nnx.Linear(width, 4 * width, rngs=rngs)
            self.down = nnx.Linear(4 * width, width, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return x + self.down(nnx.gelu(self.up(self.norm(x))))

    model = nnx.vmap(lambda rngs: Layer(rngs), in_axes=0, out_axes=0)(
        nnx.Rngs(0).fork(split=layers)
    )

    def build(remat: Remat) -> Any:
        options = None if remat is None else {**remat, "prevent_cse": False}
        body = wrapped(lambda layer, x: layer(x), options)

        def loss(model: Any, x: Any) -> Any:
            scan = nnx.scan(
                lambda x, layer: body(layer, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
            )
            return jnp.mean(scan(x, model) ** 2)

        return loss

    return Program(build, (model, drawn(batch, width)), whole=_whole(build(None)))


class LlamaBlock(nnx.Module):
    """Rotary attention with grouped keys, RMS norm and a gated MLP."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        linear = lambda n, m: nnx.Linear(n, m, use_bias=False, rngs=rngs)  # noqa: E731
        self.heads = heads
        self.norm, self.norm2 = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.q, self.o = linear(width, width), linear(width, width)
        self.kv = linear(width, 2 * width // heads)
        self.gate, self.up = linear(width, 3 * width), linear(width, 3 * width)
        self.down = linear(3 * width, width)

    def __call__(self, x: Any, mask: Any, tables: Any) -> Any:
        y, (sin, cos) = self.norm(x), tables

        def rotated(x: Any) -> Any:
            a, b = jnp.split(x, 2, axis=-1)
            return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

        k, v = jnp.split(self.kv(y)[:, :, None], 2, axis=-1)
        q = self.q(y).reshape(*x.shape[:2], self.heads, -1)
        attended = jax.nn.dot_product_attention(rotated(q), rotated(k), v, mask=mask[:, None])
        x = x + self.o(attended.reshape(x.shape))
        y = self.norm2(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


def nnx_llama(toy: bool) -> Program:
    """A Llama-shaped model whose blocks share mask and rotary tables."""
    size = sizes(toy)
    width, heads, rngs = size["width"], size["heads"], nnx.Rngs(0)
    model = nnx.Dict(
        embed=nnx.Embed(size["vocabulary"], width, rngs=rngs),
        blocks=nnx.List([LlamaBlock(width, heads, rngs) for _ in range(size["layers"])]),
        norm=nnx.RMSNorm(width, rngs=rngs),
    )

    def build(remat: Remat) -> Any:
        run = wrapped(lambda block, *args: block(*args), remat)

        def loss(model: Any, batch: Any) -> Any:
            half = width // heads // 2
            rates = 10000.0 ** (-jnp.arange(half) / half)
            angles = (jnp.arange(size["length"])[:, None] * rates[None])[None, :, None]
            x, mask, tables = (
                model.embed(batch[:, :-1]),
                causal(size),
                (jnp.sin(angles), jnp.cos(angles)),
            )
            for block in model.blocks:
                x = run(block, x, mask, tables)
            return cross_entropy(model.embed.attend(model.norm(x)), batch[:, 1:])

        return loss

    return Program(build, (model, tokens(size)), whole=_whole(build(None)))
