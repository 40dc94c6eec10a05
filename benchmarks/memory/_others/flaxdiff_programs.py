"""Networks of flaxdiff under its own kind of loss."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flaxdiff.models import simple_dit, simple_unet

from tests.zoo.plain_transformers import drawn
from tests.zoo.program import Program, Remat


def _diffusion(net_of: Any, images: Any, text: Any) -> Program:
    times = jnp.linspace(0.1, 0.9, len(images))
    params = net_of(None).init(jax.random.key(0), images, times, text)

    def build(remat: Remat) -> Any:
        net = net_of(remat)

        def loss(params: Any, images: Any, times: Any, text: Any, key: Any) -> Any:
            noise = jax.random.normal(key, images.shape)
            rate = times[:, None, None, None]
            got = net.apply(params, images * (1 - rate) + noise * rate, times, text)
            return jnp.mean((got - noise) ** 2)

        return loss

    return Program(build, (params, images, times, text, jax.random.key(1)))


def _replaced(module: Any, names: tuple[str, ...], remat: Remat, make: Any) -> Any:
    """Make a network whose blocks stand under `nn.remat`."""
    if remat is None:
        return make()

    class Net(type(make())):
        @nn.compact
        def __call__(self, *args: Any) -> Any:
            kept = {name: getattr(module, name) for name in names}
            try:
                for name, kind in kept.items():
                    setattr(module, name, nn.remat(kind, **remat))
                return super().__call__(*args)
            finally:
                for name, kind in kept.items():
                    setattr(module, name, kind)

    plain = make()
    fields = {
        k: getattr(plain, k) for k in plain.__dataclass_fields__ if k not in ("parent", "name")
    }
    return Net(**fields)


def flaxdiff_unet(toy: bool) -> Program:
    """A U-Net with attention at the lower resolutions; the authors offer no checkpoints."""
    batch, side, depths = (1, 8, (8, 16)) if toy else (4, 64, (32, 64, 128))
    attention = (None, *[{"heads": 4}] * (len(depths) - 1))

    def make() -> Any:
        return simple_unet.Unet(
            emb_features=4 * depths[0], feature_depths=depths, attention_configs=attention
        )

    return _diffusion(
        lambda remat: _replaced(simple_unet, ("ResidualBlock", "TransformerBlock"), remat, make),
        drawn(batch, side, side, 3),
        drawn(batch, 8, 32),
    )


def flaxdiff_dit(toy: bool) -> Program:
    """A diffusion transformer with rotary embeddings and adaptive normalisation."""
    batch, side, layers, width = (1, 8, 2, 32) if toy else (8, 64, 8, 192)

    def make() -> Any:
        return simple_dit.SimpleDiT(
            patch_size=4, emb_features=width, num_layers=layers, num_heads=4,
        )  # fmt: skip

    return _diffusion(
        lambda remat: _replaced(simple_dit, ("DiTBlock",), remat, make),
        drawn(batch, side, side, 3),
        drawn(batch, 8, 32),
    )
