"""Networks of dm-haiku."""

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from tests.zoo.plain_transformers import drawn, tokens
from tests.zoo.program import Program, Remat


def haiku_lstm(toy: bool) -> Program:
    """A deep LSTM over characters: `hk.dynamic_unroll`, each core under `hk.remat`."""
    size = (
        dict(batch=4, length=8, vocabulary=32)
        if toy
        else dict(batch=64, length=128, vocabulary=256)
    )
    width, layers = (8, 2) if toy else (256, 3)
    batch = tokens(size)

    def net_of(remat: Remat) -> Any:
        def run(batch: Any) -> Any:
            cores = [hk.LSTM(width) for _ in range(layers)]
            core = hk.DeepRNN([c for each in cores for c in (each, jax.nn.relu)])
            x = hk.Embed(size["vocabulary"], width)(batch[:, :-1])
            start = core.initial_state(size["batch"])

            def step(x: Any, state: Any) -> Any:
                return core(x, state)

            if remat is not None and not hk.running_init():
                step = hk.remat(step, **remat)
            y, _ = hk.dynamic_unroll(step, x, start, time_major=False)
            return hk.Linear(size["vocabulary"])(y)

        return hk.without_apply_rng(hk.transform(run))

    params = net_of(None).init(jax.random.key(0), batch)

    def build(remat: Remat) -> Any:
        net = net_of(remat)

        def loss(params: Any, batch: Any) -> Any:
            logits = net.apply(params, batch)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

        return loss

    return Program(build, (params, batch))


def haiku_mobilenet(toy: bool) -> Program:
    """MobileNet with batch normalisation in training; the package offers `hk.remat` alone."""
    batch, side = (2, 32) if toy else (8, 96)

    def run(x: Any) -> Any:
        return hk.nets.MobileNetV1(num_classes=16)(x, is_training=True)

    net = hk.without_apply_rng(hk.transform_with_state(run))
    x, labels = drawn(batch, side, side, 3), jnp.arange(batch) % 16
    params, state = net.init(jax.random.key(0), x)

    def build(remat: Remat) -> Any:
        def loss(params: Any, state: Any, x: Any, labels: Any) -> Any:
            logits, state = net.apply(params, state, x)
            each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return jnp.mean(each), state

        return loss

    return Program(build, (params, state, x, labels), has_aux=True, by_hand=False)
