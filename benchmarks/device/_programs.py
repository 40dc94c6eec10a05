"""The programs of the first two parts; none needs a package beyond those of jrc."""

import jax
import jax.numpy as jnp

from benchmarks._models.model import drawn
from benchmarks.memory import chunks, scale
from benchmarks.memory._scale_measure import Model
from tests.zoo import catalogue
from tests.zoo.program import Program, whole

GPT2, HEAD = "gpt2_124m", "head"
ZOO = (
    "scanned_gpt", "bf16_gpt", "mirrored_mlp", "unet", "linen_transformer", "nnx_llama",
    "lstm_scan", "moe_shared_router",
)  # fmt: skip
NAMES = (GPT2, *ZOO[:4], HEAD, *ZOO[4:])
TOY_NAMES = ("mirrored_mlp",)
BATCH = 8


def make(name: str, toy: bool) -> Program:
    """Return a program with arrays as arguments: GPT-2, a head with its loss, or one of the zoo."""
    if name == GPT2:
        return gpt2(toy)
    return head(toy) if name == HEAD else catalogue.make(name, toy)


def gpt2(toy: bool) -> Program:
    """Return GPT-2 of 124 M parameters, 8 x 1,024 tokens, bfloat16 in its loss."""
    model = Model(scale.TOY_SIZE if toy else scale.GPT2, "bfloat16")
    shapes = model.args(2 if toy else BATCH, model.config.length)
    args = drawn(shapes, numbers=model.config.vocabulary)
    return Program(lambda remat: model.loss if remat is None else whole(model.loss, remat), args)


def head(toy: bool) -> Program:
    """Return a head of 50,304 words and its loss, of 32,768 tokens, bfloat16."""
    tokens, width, words = (64, 16, 128) if toy else (32_768, 768, 50_304)
    keys = jax.random.split(jax.random.key(0), 3)
    args = (
        jax.random.normal(keys[0], (width, words), jnp.bfloat16) / 16,
        jax.random.normal(keys[1], (tokens, width), jnp.bfloat16),
        jax.random.randint(keys[2], (tokens,), 0, words),
    )
    return Program(lambda remat: chunks.head_loss, args, argnums=(0, 1), by_hand=False)
