"""Gemma from its package, with random weights."""

from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
from gemma import gm
from gemma.gm.nn import _modules, _transformer, config

from tests.zoo.plain_transformers import cross_entropy, sizes, tokens
from tests.zoo.program import Program, Remat


def gemma(toy: bool) -> Program:
    """Local and global attention that share masks and positions."""
    size = sizes(toy)
    kinds = (_modules.AttentionType.LOCAL_SLIDING, _modules.AttentionType.GLOBAL)
    shape = config.TransformerConfig(
        num_embed=size["vocabulary"], embed_dim=size["width"], hidden_dim=4 * size["width"],
        num_heads=size["heads"], head_dim=size["width"] // size["heads"], num_kv_heads=1,
        final_logit_softcap=30.0, use_post_attn_norm=True, use_post_ffw_norm=True,
        attention_types=config.make_attention_layers_types(kinds, num_layers=size["layers"]),
        sliding_window_size=size["length"] // 2, attn_logits_soft_cap=50.0,
    )  # fmt: skip
    batch = tokens(size)

    def net(kind: type[nn.Module]) -> nn.Module:
        # A class of its own: `nn.jit` caches by class and fields.
        class Net(gm.nn.Gemma3_270M):
            def setup(self) -> None:
                with mock.patch.object(_transformer._modules, "Block", kind):
                    super().setup()

        return Net(config=shape, dtype=jnp.float32)

    params = net(_modules.Block).init(jax.random.key(0), batch[:, :-1])

    def build(remat: Remat) -> Any:
        model = net(_modules.Block if remat is None else nn.remat(_modules.Block, **remat))

        def loss(params: Any, batch: Any) -> Any:
            return cross_entropy(model.apply(params, batch[:, :-1]).logits, batch[:, 1:])

        return loss

    return Program(build, (params, batch), tolerance=1e-5)
