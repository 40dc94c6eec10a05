"""Keras 3 on JAX through its stateless API."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

from typing import Any  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import keras  # noqa: E402

from tests.zoo.plain_transformers import cross_entropy, drawn, sizes, tokens  # noqa: E402
from tests.zoo.program import Program, Remat  # noqa: E402


def _values(variables: Any) -> list[jax.Array]:
    return [v.value for v in variables]


def stateless_program(model: Any, loss_of: Any, args: tuple[Any, ...], **options: Any) -> Program:
    """Return the loss of a model: trainable variables, others, data."""

    def build(remat: Remat) -> Any:
        def loss(trainable: Any, others: Any, *data: Any) -> Any:
            out, others = model.stateless_call(trainable, others, data[0], training=True)
            return loss_of(out, *data[1:]), others

        return loss

    given = (_values(model.trainable_variables), _values(model.non_trainable_variables), *args)
    return Program(build, given, has_aux=True, by_hand=False, **options)


def keras_convnet(toy: bool) -> Program:
    """Convolutions with batch normalisation and dropout."""
    layers, width, side, batch = (3, 8, 8, 8) if toy else (8, 64, 32, 32)
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((side, side, 3))
    for _ in range(layers):
        x = keras.layers.Conv2D(width, 3, padding="same", use_bias=False)(x)
        x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
        x = keras.layers.Dropout(0.1)(x)
    logits = keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(x))
    model = keras.Model(inputs, logits)
    args = (drawn(batch, side, side, 3), jnp.arange(batch) % 10)
    return stateless_program(model, cross_entropy, args, tolerance=1e-4)


def _transformer(toy: bool) -> tuple[Any, Any, dict[str, int]]:
    size = sizes(toy)
    keras.utils.set_random_seed(0)
    batch = tokens(size)
    width, layers = size["width"], keras.layers
    inputs = keras.Input((size["length"],), dtype="int32")
    x = layers.Embedding(size["vocabulary"], width)(inputs)
    for i in range(size["layers"]):
        y = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(size["heads"], width // size["heads"], dropout=0.1)
        x = x + attention(y, y, use_causal_mask=True)
        y = layers.Dense(4 * width, activation="gelu", name=f"up_{i}")(
            layers.LayerNormalization()(x)
        )
        x = x + layers.Dropout(0.1)(layers.Dense(width)(y))
    logits = layers.Dense(size["vocabulary"])(layers.LayerNormalization()(x))
    return keras.Model(inputs, logits), batch, size


def keras_transformer(toy: bool) -> Program:
    """Attention with dropout; each layer makes its own causal mask."""
    model, batch, _ = _transformer(toy)
    return stateless_program(model, cross_entropy, (batch[:, :-1], batch[:, 1:]))


def keras_remat(toy: bool) -> Program:
    """A transformer under `keras.RematScope`: layers stand under the user's own checkpoints.

    Of the wide layers alone: Keras traces the flag `training` of a layer under a scope, so that
    those with dropout fail.
    """
    names = [f"up_{i}" for i in range(sizes(toy)["layers"])]
    with keras.RematScope(mode="list_of_layers", layer_names=names):
        model, batch, _ = _transformer(toy)
    return stateless_program(model, cross_entropy, (batch[:, :-1], batch[:, 1:]))
