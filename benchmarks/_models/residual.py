"""ResNet-50 on images of CIFAR's size."""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks._models.by_hand import in_turn, regions
from benchmarks._models.model import Model, array
from benchmarks._private import cross_entropy, dense
from jrc.models import resnet


def resnet_loss(params: Any, state: Any, batch: Any, *, config: Any, through: Any) -> Any:
    x, labels = batch
    x, new = resnet.stem(params["stem"], state["stem"], x, config, train=True)
    names = [name.split("/") for name in config.boundaries[1:]]

    def run(stage: str, name: str, carry: Any) -> Any:
        x, new = carry
        stride = 2 if stage != "stage_1" and name == "block_0" else 1
        block = functools.partial(resnet.block, stride=stride, train=True)
        x, found = block(params[stage][name], state[stage][name], x)
        return x, new | {f"{stage}/{name}": found}

    blocks = [functools.partial(run, *name) for name in names]
    x, new = through(SimpleNamespace(blocks=blocks), (x, {"stem": new}))
    logits = dense(params["head"], jnp.mean(x, axis=(1, 2)))
    return cross_entropy(logits, labels), new


def resnet_model(title: str, toy: bool, depth: int = 50, batch: int = 64) -> Model:
    """Return a ResNet on images of 32 x 32."""
    config = resnet.Config(
        depth=8 if toy else depth, classes=10, stem="cifar", width=4 if toy else None
    )
    params, state = jax.eval_shape(functools.partial(resnet.init, config=config), jax.random.key(0))
    size, batch = (8, 2) if toy else (32, batch)
    images = (array(batch, size, size, 3), array(batch, dtype=jnp.int32))
    loss = functools.partial(resnet_loss, config=config)
    ways = regions(loss, sum(config.stages))
    plain = functools.partial(loss, through=in_turn)
    return Model(title, plain, (params, state, images), ways, has_aux=True)
