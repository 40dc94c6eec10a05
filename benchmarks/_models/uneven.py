"""An MLP whose layers have very different widths."""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks._models.by_hand import in_turn, regions
from benchmarks._models.model import Model, array
from benchmarks._private import dense


def _loss(params: Any, batch: Any, *, through: Any) -> Any:
    x, y = batch
    blocks = [
        functools.partial(lambda layer, act, x: act(dense(layer, x)), layer, act)
        for layer, act in zip(params, [jax.nn.gelu, jnp.tanh] * len(params), strict=False)
    ]
    return jnp.mean((through(SimpleNamespace(blocks=blocks), x) - y) ** 2)


def mlp_model(title: str, toy: bool, layers: int = 12, batch: int = 2048) -> Model:
    """Return dense layers of very different widths."""
    widths = [256, 4096, 64, 2048, 512, 4096, 128, 1024, 4096, 256, 2048, 64, 1024][: layers + 1]
    if toy:
        widths, batch = [max(n // 64, 2) for n in widths[:7]], 16
    params = [{"w": array(a, b), "b": array(b)} for a, b in zip(widths, widths[1:], strict=False)]
    data = (array(batch, widths[0]), array(batch, widths[-1]))
    plain = functools.partial(_loss, through=in_turn)
    return Model(title, plain, (params, data), regions(_loss, len(params)))
