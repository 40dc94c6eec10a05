"""Transforms of dm-haiku: ResNet-18 with a state, a transformer that draws its own keys."""

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from tests.zoo.plain_transformers import causal, cross_entropy, drawn, sizes, tokens
from tests.zoo.program import Program, Remat


def wrapped(block: Any, remat: Remat) -> Any:
    """Return a module, recomputed as `remat` says."""
    return block if remat is None else hk.remat(block, **remat)


def _resnet(net: hk.nets.ResNet, x: Any, remat: Remat) -> Any:
    """Run a ResNet block by block, as its own call does."""
    x = jax.nn.relu(net.initial_batchnorm(net.initial_conv(x), True))
    x = hk.max_pool(x, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for group in net.block_groups:
        for block in group.blocks:
            x = wrapped(lambda x, block=block: block(x, True, False), remat)(x)
    return net.logits(jnp.mean(x, axis=(1, 2)))


def hk_resnet18(toy: bool) -> Program:
    """ResNet-18 as `hk.nets.ResNet18` has it, with running means; toy: fewer channels."""
    side, batch = (32, 4) if toy else (64, 16)
    channels = (8, 8, 16, 16) if toy else (64, 128, 256, 512)

    def forward(x: Any, remat: Remat = None) -> Any:
        net = hk.nets.ResNet(
            (2, 2, 2, 2), 10, bottleneck=False, channels_per_group=channels,
            use_projection=(False, True, True, True),
            initial_conv_config={"output_channels": channels[0]},
        )  # fmt: skip
        return net(x, is_training=True) if remat is None else _resnet(net, x, remat)

    images, labels = drawn(batch, side, side, 3), jnp.arange(batch) % 10
    params, state = hk.transform_with_state(forward).init(jax.random.key(0), images)

    def build(remat: Remat) -> Any:
        apply = hk.transform_with_state(lambda x: forward(x, remat)).apply

        def loss(params: Any, state: Any, key: Any, images: Any, labels: Any) -> Any:
            logits, new = apply(params, state, key, images)
            return cross_entropy(logits, labels), new

        return loss

    args = (params, state, jax.random.key(1), images, labels)
    return Program(build, args, has_aux=True, tolerance=1e-4)


def hk_transformer(toy: bool) -> Program:
    """A transformer with dropout, whose keys come from `hk.next_rng_key`."""
    size = sizes(toy)
    width, heads = size["width"], size["heads"]

    def block(x: Any, mask: Any) -> Any:
        norm = lambda x: hk.LayerNorm(-1, True, True)(x)  # noqa: E731
        init = hk.initializers.VarianceScaling(2.0 / size["layers"])
        y = norm(x)
        y = hk.MultiHeadAttention(heads, width // heads, w_init=init)(y, y, y, mask=mask)
        x = x + hk.dropout(hk.next_rng_key(), 0.1, y)
        y = hk.Linear(width)(jax.nn.gelu(hk.Linear(4 * width)(norm(x))))
        return x + hk.dropout(hk.next_rng_key(), 0.1, y)

    def forward(batch: Any, remat: Remat = None) -> Any:
        x, mask = hk.Embed(size["vocabulary"], width)(batch), causal(size)[:, None]
        for _ in range(size["layers"]):
            x = wrapped(block, remat)(x, mask)
        return hk.Linear(size["vocabulary"])(hk.LayerNorm(-1, True, True)(x))

    batch = tokens(size)
    params = hk.transform(forward).init(jax.random.key(0), batch[:, :-1])

    def build(remat: Remat) -> Any:
        apply = hk.transform(lambda batch: forward(batch, remat)).apply

        def loss(params: Any, key: Any, batch: Any) -> Any:
            return cross_entropy(apply(params, key, batch[:, :-1]), batch[:, 1:])

        return loss

    return Program(build, (params, jax.random.key(1), batch))
