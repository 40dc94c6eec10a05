"""Built-in modules of flax linen: as they are, under `nn.remat`, scanned, with running means."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from tests.zoo.plain_transformers import causal, cross_entropy, drawn, sizes, tokens
from tests.zoo.program import Program, Remat


class Block(nn.Module):
    """A block of built-in attention and dropout; a scan's body too."""

    heads: int

    @nn.compact
    def __call__(self, x: Any, mask: Any) -> Any:
        width = x.shape[-1]
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(self.heads)(y, y, mask=mask)
        x = x + nn.Dropout(0.1, deterministic=False)(y)
        y = nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x))))
        return x + nn.Dropout(0.1, deterministic=False)(y)


class Transformer(nn.Module):
    """A transformer of any kind of block."""

    size: Any
    layers: Callable[..., Any]

    @nn.compact
    def __call__(self, batch: Any) -> Any:
        size = dict(self.size)
        x = nn.Embed(size["vocabulary"], size["width"])(batch)
        x = self.layers(x, causal(size)[:, None], size)
        return nn.Dense(size["vocabulary"])(nn.LayerNorm()(x))


def unrolled(kind: type[nn.Module]) -> Callable[..., Any]:
    """Return layers in turn."""

    def run(x: Any, mask: Any, size: Any) -> Any:
        for i in range(size["layers"]):
            x = kind(size["heads"], name=f"block_{i}")(x, mask)
        return x

    return run


def scanned(kind: type[nn.Module]) -> Callable[..., Any]:
    """Return layers as one `nn.scan`."""

    class Step(nn.Module):
        heads: int

        @nn.compact
        def __call__(self, x: Any, mask: Any) -> Any:
            return kind(self.heads, name="block")(x, mask), None

    def run(x: Any, mask: Any, size: Any) -> Any:
        scan = nn.scan(
            Step, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast, length=size["layers"],
        )  # fmt: skip
        return scan(size["heads"])(x, mask)[0]

    return run


def _kind(remat: Remat) -> type[nn.Module]:
    return Block if remat is None else nn.remat(Block, **remat)


def _program(toy: bool, layers_of: Callable[[Remat], Any], **ways: Any) -> Program:
    size = sizes(toy)
    frozen, batch = tuple(size.items()), tokens(size)

    def build(remat: Remat, layers: Any = None) -> Any:
        net = Transformer(frozen, layers or layers_of(remat))

        def loss(params: Any, key: Any, batch: Any) -> Any:
            logits = net.apply(params, batch[:, :-1], rngs={"dropout": key})
            return cross_entropy(logits, batch[:, 1:])

        return loss

    keys = {"params": jax.random.key(0), "dropout": jax.random.key(0)}
    params = Transformer(frozen, layers_of(None)).init(keys, batch[:, :-1])
    others = {name: build(None, layers) for name, layers in ways.items()}
    return Program(build, (params, jax.random.key(1), batch), ways=others)


def linen_transformer(toy: bool) -> Program:
    """Layers in turn, with a shared mask and dropout."""
    return _program(toy, lambda remat: unrolled(_kind(remat)))


def linen_remat(toy: bool) -> Program:
    """The blocks stand under `nn.remat` in the model."""
    return _program(
        toy,
        lambda remat: unrolled(nn.remat(Block, **(remat or {}))),
        **{"without nn.remat": unrolled(Block)},
    )


def linen_scan(toy: bool) -> Program:
    """Layers as one `nn.scan`."""
    return _program(
        toy,
        lambda remat: scanned(_kind(None if remat is None else {**remat, "prevent_cse": False})),
    )


class Half(nn.Module):
    """A block without arguments besides its input, for `nn.remat_scan`."""

    width: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        y = nn.Dense(4 * self.width)(nn.LayerNorm()(x))
        return x + nn.Dense(self.width)(nn.gelu(y))


def linen_remat_scan(toy: bool) -> Program:
    """Blocks under `nn.remat_scan`, two loops deep."""
    lengths, width, batch = ((2, 2), 16, 256) if toy else ((4, 4), 256, 2048)
    net = nn.remat_scan(Half, lengths=lengths)(width)
    x = drawn(batch, width)
    params = net.init(jax.random.key(0), x)

    def build(remat: Remat) -> Any:
        return lambda params, x: jnp.mean(net.apply(params, x) ** 2)

    return Program(build, (params, x), by_hand=False)


class ConvBlock(nn.Module):
    """Convolution and batch normalisation."""

    width: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        y = nn.Conv(self.width, (3, 3), use_bias=False)(x)
        y = nn.relu(nn.BatchNorm(use_running_average=False)(y))
        return y if x.shape != y.shape else x + y


def linen_batchnorm(toy: bool) -> Program:
    """A convolutional net with running means, which are an argument and a result."""
    layers, width, side, batch = (3, 8, 8, 8) if toy else (8, 64, 32, 32)

    class Net(nn.Module):
        kind: type[nn.Module]

        @nn.compact
        def __call__(self, x: Any) -> Any:
            for i in range(layers):
                x = self.kind(width, name=f"block_{i}")(x)
            return nn.Dense(10)(jnp.mean(x, axis=(1, 2)))

    images, labels = drawn(batch, side, side, 3), jnp.arange(batch) % 10
    variables = Net(ConvBlock).init(jax.random.key(0), images)

    def build(remat: Remat) -> Any:
        net = Net(ConvBlock if remat is None else nn.remat(ConvBlock, **remat))

        def loss(params: Any, stats: Any, images: Any, labels: Any) -> Any:
            given = {"params": params, "batch_stats": stats}
            logits, new = net.apply(given, images, mutable=["batch_stats"])
            return cross_entropy(logits, labels), new["batch_stats"]

        return loss

    args = (variables["params"], variables["batch_stats"], images, labels)
    return Program(build, args, has_aux=True, tolerance=1e-4)
