"""A linen vision transformer and an nnx MLP-Mixer, as flax users write them.

`through(model, x)` runs `model.blocks` on `x`; recomputation by hand puts flax's own `remat` there.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from benchmarks._models.by_hand import in_turn, regions
from benchmarks._models.model import Model, array
from benchmarks._private import cross_entropy

_PATCH = 4
_CLASSES = 10


class _Attention(nn.Module):
    """A pre-norm block: self-attention, then an MLP of 4 x width."""

    width: int
    heads: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x))
        h = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
        return x + nn.Dense(self.width)(h)


class VisionTransformer(nn.Module):
    """Patches of 4 x 4, learned positions, mean over the patches."""

    layers: int = 6
    width: int = 256
    heads: int = 8
    through: Callable[..., Any] = in_turn

    def setup(self) -> None:
        self.patches = nn.Conv(self.width, (_PATCH, _PATCH), strides=(_PATCH, _PATCH))
        self.blocks = [_Attention(self.width, self.heads) for _ in range(self.layers)]
        self.positions = nn.Embed(256, self.width)
        self.norm, self.head = nn.LayerNorm(), nn.Dense(_CLASSES)

    def __call__(self, images: Any) -> Any:
        x = self.patches(images).reshape(images.shape[0], -1, self.width)
        x = x + self.positions(jnp.arange(x.shape[1]))[None]
        x = self.through(self, x)
        return self.head(jnp.mean(self.norm(x), axis=1))


class _Mixing(nnx.Module):
    """An MLP over the patches, then one over the channels."""

    def __init__(self, tokens: int, width: int, *, rngs: nnx.Rngs) -> None:
        self.norm_1, self.norm_2 = (nnx.LayerNorm(width, rngs=rngs) for _ in range(2))
        self.up_1 = nnx.Linear(tokens, 2 * tokens, rngs=rngs)
        self.down_1 = nnx.Linear(2 * tokens, tokens, rngs=rngs)
        self.up_2 = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down_2 = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        across = jnp.swapaxes(self.norm_1(x), 1, 2)
        x = x + jnp.swapaxes(self.down_1(jax.nn.gelu(self.up_1(across))), 1, 2)
        return x + self.down_2(jax.nn.gelu(self.up_2(self.norm_2(x))))


class Mixer(nnx.Module):
    """An MLP-Mixer on patches of 4 x 4.

    Source: Tolstikhin et al., "MLP-Mixer", arXiv 2105.01601, sec. 2.
    """

    def __init__(
        self, layers: int = 6, tokens: int = 256, width: int = 256, *, rngs: nnx.Rngs
    ) -> None:
        size = (_PATCH, _PATCH)
        self.patches = nnx.Conv(3, width, size, strides=size, rngs=rngs)
        self.blocks = nnx.List([_Mixing(tokens, width, rngs=rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, _CLASSES, rngs=rngs)

    def __call__(self, images: Any, through: Callable[..., Any] = in_turn) -> Any:
        x = self.patches(images)
        x = through(self, x.reshape(x.shape[0], -1, x.shape[-1]))
        return self.head(jnp.mean(self.norm(x), axis=1))


def _images(toy: bool, batch: int) -> tuple[Any, Any]:
    size = 8 if toy else 64
    return array(batch, size, size, 3), array(batch, dtype=jnp.int32)


def linen_model(title: str, toy: bool, layers: int = 6, batch: int = 16) -> Model:
    """Return the vision transformer on images of 64 x 64."""
    sizes = {"layers": 3, "width": 8, "heads": 2} if toy else {"layers": layers}
    images = _images(toy, 2 if toy else batch)
    params = jax.eval_shape(VisionTransformer(**sizes).init, jax.random.key(0), images[0])

    def loss(params: Any, batch: Any, *, through: Any) -> Any:
        logits = VisionTransformer(**sizes, through=through).apply(params, batch[0])
        return cross_entropy(logits, batch[1])

    ways = regions(loss, VisionTransformer(**sizes).layers, nn.remat)
    return Model(title, functools.partial(loss, through=in_turn), (params, images), ways)


def nnx_model(title: str, toy: bool) -> Model:
    """Return the MLP-Mixer on 32 images of 64 x 64."""
    sizes = {"layers": 3, "tokens": 4, "width": 8} if toy else {}
    batch = _images(toy, 2 if toy else 32)
    module = nnx.eval_shape(lambda: Mixer(**sizes, rngs=nnx.Rngs(0)))
    graph, params = nnx.split(module)

    def loss(params: Any, batch: Any, *, through: Any) -> Any:
        logits = nnx.merge(graph, params)(batch[0], through=through)
        return cross_entropy(logits, batch[1])

    ways = regions(loss, len(module.blocks), nnx.remat)
    return Model(title, functools.partial(loss, through=in_turn), (params, batch), ways)
