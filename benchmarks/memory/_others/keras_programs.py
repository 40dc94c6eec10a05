"""Gemma of Keras Hub, beside Keras's own recomputation of layers."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax.numpy as jnp  # noqa: E402
import keras  # noqa: E402
import keras_hub  # noqa: E402

from tests.zoo.keras_models import stateless_program  # noqa: E402
from tests.zoo.plain_transformers import cross_entropy, tokens  # noqa: E402
from tests.zoo.program import Program  # noqa: E402


def keras_gemma(toy: bool) -> Program:
    """Gemma with caps on scores and logits; its blocks under `keras.RematScope` by hand."""
    layers, width, batch, length = (2, 32, 1, 32) if toy else (8, 256, 4, 256)
    size = dict(batch=batch, length=length, vocabulary=256 if toy else 8192)
    text = tokens(size)
    inputs = {"token_ids": text[:, :-1], "padding_mask": jnp.ones((batch, length), bool)}

    def program_in(scope: keras.RematScope, **options: object) -> Program:
        with scope:
            keras.utils.set_random_seed(0)
            backbone = keras_hub.models.GemmaBackbone(
                size["vocabulary"], layers, num_query_heads=8, num_key_value_heads=4,
                hidden_dim=width, intermediate_dim=8 * width, head_dim=width // 8,
                attention_logit_soft_cap=50.0, final_logit_soft_cap=30.0,
                use_post_ffw_norm=True, use_post_attention_norm=True,
            )  # fmt: skip
            model = keras_hub.models.GemmaCausalLM(backbone)
        return stateless_program(model, cross_entropy, (inputs, text[:, 1:]), **options)

    blocks = [f"decoder_block_{i}" for i in range(layers)]
    recomputed = program_in(keras.RematScope(mode="list_of_layers", layer_names=blocks))
    ways = {"authors: RematScope of the blocks": recomputed.loss}
    return program_in(keras.RematScope(mode=None), ways=ways)
