"""The GPT, unrolled, scanned and with dropout."""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks._models.by_hand import in_turn, loops, regions
from benchmarks._models.model import Model, array
from benchmarks._private import cross_entropy
from jrc.models import gpt


def _loss(params: Any, batch: Any, key: Any = None, *, config: Any, through: Any) -> Any:
    """Return what `gpt.loss` returns; `through` runs the blocks."""
    if config.scan:
        return gpt.loss(params, batch, key, config=config, loop=through)
    keys = [None] * (config.layers + 1) if key is None else jax.random.split(key, config.layers + 1)
    x = gpt.embed(params, batch[:, :-1], config, key=keys[0])
    blocks = [
        functools.partial(
            lambda params, key, x: gpt.block(params, x, config, key=key), params[name], block_key
        )
        for name, block_key in zip(config.boundaries, keys[1:], strict=True)
    ]
    x = through(SimpleNamespace(blocks=blocks), x)
    return cross_entropy(gpt.unembed(params, x), batch[:, 1:])


def gpt_model(
    title: str,
    toy: bool,
    scan: bool = False,
    dropout: float = 0.0,
    layers: int = 12,
    batch: int = 4,
) -> Model:
    """Return a GPT, 256 wide, on sequences of 512 tokens."""
    sizes = {"layers": layers, "heads": 8, "width": 256, "length": 512}
    if toy:
        sizes = {"layers": 4 if scan else 3, "heads": 2, "width": 16, "length": 16}
    config = gpt.Config(**sizes, scan=scan, dropout=dropout)
    params = jax.eval_shape(functools.partial(gpt.init, config=config), jax.random.key(0))
    args = (params, array(2 if toy else batch, config.length + 1, dtype=jnp.int32))
    if dropout:
        args += (jax.eval_shape(jax.random.key, 0),)
    loss = functools.partial(_loss, config=config)
    ways = (loops if scan else regions)(loss, config.layers)
    plain = functools.partial(loss, through=jax.lax.scan if scan else in_turn)
    return Model(title, plain, args, ways, scanned=scan)
