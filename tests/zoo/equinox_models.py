"""Modules of equinox, passed whole: arrays beside functions, numbers and flags as leaves."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from tests.zoo.plain_transformers import cross_entropy, drawn
from tests.zoo.program import Program, Remat


def wrapped(block: Any, remat: Remat) -> Any:
    """Return a module, recomputed as `remat` says."""
    return block if remat is None else eqx.filter_checkpoint(block, **remat)


def whole(loss: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """Return a loss under one checkpoint."""
    return eqx.filter_checkpoint(loss, **(remat or {}))


class Layer(eqx.Module):
    """A layer with a function, a number and a module as leaves."""

    linear: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout
    activation: Callable[..., Any]
    scale: float

    def __call__(self, x: Any, key: Any) -> Any:
        y = self.activation(self.linear(self.norm(x)))
        return x + self.scale * self.dropout(y, key=key)


def eqx_mlp(toy: bool) -> Program:
    """An MLP with dropout over a batch."""
    layers, width, batch = (4, 16, 256) if toy else (8, 256, 4096)
    keys = jax.random.split(jax.random.key(0), layers)
    model = [
        Layer(
            eqx.nn.Linear(width, width, key=key), eqx.nn.LayerNorm(width), eqx.nn.Dropout(0.1),
            jax.nn.gelu, 0.5,
        )
        for key in keys
    ]  # fmt: skip

    def build(remat: Remat) -> Any:
        def loss(model: Any, x: Any, key: Any) -> Any:
            run = wrapped(lambda layer, x, keys: jax.vmap(layer)(x, keys), remat)
            for layer, own in zip(model, jax.random.split(key, layers), strict=True):
                x = run(layer, x, jax.random.split(own, batch))
            return jnp.mean(x**2)

        return loss

    return Program(build, (model, drawn(batch, width), jax.random.key(1)))


class Block(eqx.Module):
    """A block of a vision transformer."""

    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, width: int, heads: int, key: Any):
        one, two = jax.random.split(key)
        self.norms = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(heads, width, dropout_p=0.1, key=one)
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=two)
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x: Any, key: Any) -> Any:
        one, two = jax.random.split(key)
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, key=one)
        y = jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))
        return x + self.dropout(y, key=two)


class ViT(eqx.Module):
    """A vision transformer whose patch size is a plain integer, a leaf that a shape depends on."""

    patch: int
    embed: eqx.nn.Linear
    positions: jax.Array
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, side: int, patch: int, width: int, layers: int, key: Any):
        keys = jax.random.split(key, layers + 3)
        self.patch = patch
        self.embed = eqx.nn.Linear(3 * patch**2, width, key=keys[0])
        self.positions = 0.02 * jax.random.normal(keys[1], ((side // patch) ** 2, width))
        self.head = eqx.nn.Linear(width, 10, key=keys[2])
        self.blocks = [Block(width, 2, key) for key in keys[3:]]

    def __call__(self, image: Any, key: Any, remat: Remat) -> Any:
        n = image.shape[0] // self.patch
        x = image.reshape(n, self.patch, n, self.patch, 3).transpose(0, 2, 1, 3, 4)
        x = jax.vmap(self.embed)(x.reshape(n * n, -1)) + self.positions
        for block, own in zip(self.blocks, jax.random.split(key, len(self.blocks)), strict=True):
            x = wrapped(block, remat)(x, own)
        return self.head(jnp.mean(x, axis=0))


def eqx_vit(toy: bool) -> Program:
    """A vision transformer with attention and dropout of equinox."""
    layers, width, side, batch = (2, 16, 16, 4) if toy else (8, 192, 64, 16)
    model = ViT(side, 4, width, layers, jax.random.key(0))

    def build(remat: Remat) -> Any:
        def loss(model: Any, images: Any, labels: Any, key: Any) -> Any:
            run = jax.vmap(lambda image, key: model(image, key, remat))
            return cross_entropy(run(images, jax.random.split(key, batch)), labels)

        return loss

    args = (model, drawn(batch, side, side, 3), jnp.arange(batch) % 10, jax.random.key(1))
    return Program(build, args)


class ConvBlock(eqx.Module):
    """Convolution, batch normalisation with a state, rectifier."""

    conv: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm

    def __init__(self, inputs: int, outputs: int, key: Any):
        self.conv = eqx.nn.Conv2d(inputs, outputs, 3, padding=1, key=key)
        self.norm = eqx.nn.BatchNorm(outputs, axis_name="batch", mode="batch")

    def __call__(self, x: Any, state: Any) -> Any:
        x, state = self.norm(self.conv(x), state)
        return jax.nn.relu(x), state


class ConvNet(eqx.Module):
    """Blocks with batch normalisation."""

    blocks: list[ConvBlock]
    head: eqx.nn.Linear

    def __init__(self, width: int, layers: int, key: Any):
        keys = jax.random.split(key, layers + 1)
        self.blocks = [
            ConvBlock(width if i else 3, width, key) for i, key in enumerate(keys[:layers])
        ]
        self.head = eqx.nn.Linear(width, 10, key=keys[-1])

    def __call__(self, x: Any, state: Any, remat: Remat) -> Any:
        for block in self.blocks:
            x, state = wrapped(block, remat)(x, state)
        return self.head(jnp.mean(x, axis=(1, 2))), state


def eqx_batchnorm(toy: bool) -> Program:
    """Convolutions and batch normalisation, whose state is an argument and a result."""
    layers, width, side, batch = (3, 8, 8, 8) if toy else (8, 64, 32, 32)
    model, state = eqx.nn.make_with_state(ConvNet)(width, layers, jax.random.key(0))

    def build(remat: Remat) -> Any:
        def loss(model: Any, state: Any, images: Any, labels: Any) -> Any:
            run = jax.vmap(
                lambda x, state: model(x, state, remat), axis_name="batch",
                in_axes=(0, None), out_axes=(0, None),
            )  # fmt: skip
            logits, state = run(images, state)
            return cross_entropy(logits, labels), state

        return loss

    args = (model, state, drawn(batch, 3, side, side), jnp.arange(batch) % 10)
    return Program(build, args, has_aux=True)
