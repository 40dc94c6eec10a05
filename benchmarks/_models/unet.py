"""A U-Net that takes the noise out of an image."""

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks._models.by_hand import in_turn, regions
from benchmarks._models.model import Model, array
from benchmarks._private import conv, layer_norm


def _twice(params: Sequence[Any], x: Any) -> Any:
    """Apply two convolutions, each followed by layer norm over the channels and silu."""
    for layer in params:
        x = jax.nn.silu(layer_norm(layer["norm"], conv(layer["conv"], x)))
    return x


def _down(params: Any, first: bool, carry: Any) -> Any:
    x, skips = carry
    if not first:
        b, h, w, c = x.shape
        x = jnp.mean(x.reshape(b, h // 2, 2, w // 2, 2, c), axis=(2, 4))
    x = _twice(params, x)
    return x, (*skips, x)


def _up(params: Any, carry: Any) -> Any:
    x, (*skips, skip) = carry
    x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
    return _twice(params, jnp.concatenate([x, skip], axis=-1)), tuple(skips)


def _bottom(params: Any, carry: Any) -> Any:
    x, skips = _down(params, False, carry)
    return x, skips[:-1]


def _loss(params: Any, batch: Any, *, through: Any) -> Any:
    """Return the mean squared error of the image that is computed from a noisy one."""
    noisy, clean = batch
    blocks = [
        functools.partial(_down, layers, i == 0) for i, layers in enumerate(params["down"][:-1])
    ]
    blocks += [functools.partial(_bottom, params["down"][-1])]
    blocks += [functools.partial(_up, layers) for layers in params["up"]]
    x, _ = through(SimpleNamespace(blocks=blocks), (noisy, ()))
    return jnp.mean((conv(params["head"], x) - clean) ** 2)


def unet_model(title: str, toy: bool, levels: int = 4, batch: int = 16) -> Model:
    """Return a U-Net on images of 64 x 64."""
    widths = [8, 8, 16] if toy else [32, 64, 128, 256][:levels]
    size, batch = (8, 2) if toy else (64, batch)

    def two(inputs: int, outputs: int) -> list[Any]:
        norm = {"scale": array(outputs), "bias": array(outputs)}
        return [{"conv": array(3, 3, n, outputs), "norm": norm} for n in (inputs, outputs)]

    params = {
        "down": [two(a, b) for a, b in zip([3, *widths], widths, strict=False)],
        "up": [two(a + b, b) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True)],
        "head": array(1, 1, widths[0], 3),
    }
    images = (array(batch, size, size, 3),) * 2
    plain = functools.partial(_loss, through=in_turn)
    return Model(title, plain, (params, images), regions(_loss, 2 * len(widths) - 1))
