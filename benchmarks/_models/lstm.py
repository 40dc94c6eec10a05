"""LSTM language models: two layers that are trained, and one over a long sequence to be planned.

    >>> import jax, jax.numpy as jnp
    >>> params = init(jax.random.key(0), width=8)
    >>> loss(params, jnp.zeros((2, 5), int)).shape
    ()

Every sequence starts from a state of zeros. The parameters of two layers are `tokens`, `layer_1`,
`layer_2` and `head`.

Source: Zaremba, Sutskever and Vinyals, "Recurrent Neural Network Regularization", arXiv 1409.2329,
section 3.1, without dropout.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks._lib.examples import lstm_cell
from benchmarks._models.by_hand import loops
from benchmarks._models.model import Model, array
from benchmarks._private import cross_entropy, dense

VOCABULARY = 256
LAYERS = ("layer_1", "layer_2")


def init(key: jax.Array, width: int) -> dict[str, Any]:
    """Return parameters, float32: embedding, two layers of `width` cells, an output layer."""
    token_key, head_key, *layer_keys = jax.random.split(key, 2 + len(LAYERS))
    layers = {name: _init_layer(k, width) for name, k in zip(LAYERS, layer_keys, strict=True)}
    return {
        "tokens": jax.random.normal(token_key, (VOCABULARY, width)),
        **layers,
        # Small: an untrained model gives every byte about the same probability.
        "head": {
            "w": jax.random.normal(head_key, (width, VOCABULARY)) * (0.1 / math.sqrt(width)),
            "b": jnp.zeros(VOCABULARY),
        },
    }


def _init_layer(key: jax.Array, width: int) -> dict[str, jax.Array]:
    """Return the weights of i, f, g and o; the bias of the forget gate starts at 1."""
    keys = jax.random.split(key)
    scale = 1.0 / math.sqrt(width)
    names = ("input", "hidden")
    shape = (width, 4 * width)
    weights = {
        name: scale * jax.random.normal(k, shape) for name, k in zip(names, keys, strict=True)
    }
    return {**weights, "b": jnp.zeros((4, width)).at[1].set(1.0).reshape(-1)}


def apply(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """Return logits `(batch, length, 256)` of the next byte at each position."""
    # Time first: a loop reads along the leading axis.
    x = params["tokens"][tokens.T]
    for name in LAYERS:
        x = _layer(params[name], x)
    logits = x @ params["head"]["w"] + params["head"]["b"][None, None]
    return logits.transpose(1, 0, 2)


def _layer(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Return the hidden states, `(length, batch, width)`, of a layer on `x`, same shape."""
    # The products with the input are independent of each other: one matrix product.
    inputs = x @ params["input"] + params["b"][None, None]

    def step(state: tuple[jax.Array, jax.Array], gates: jax.Array) -> Any:
        h, c = state
        h, c = lstm_cell(gates + h @ params["hidden"], c)
        return (h, c), h

    # Under shard_map the initial carry must vary over the same axes as the batch.
    zeros = jnp.zeros_like(x[0])
    return jax.lax.scan(step, (zeros, zeros), inputs)[1]


def loss(params: dict[str, Any], batch: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """Return the mean cross-entropy in nats of each next byte of `(batch, length + 1)`."""
    del key
    return cross_entropy(apply(params, batch[:, :-1]), batch[:, 1:])


def _long_loss(params: Any, batch: Any, *, through: Any) -> Any:
    """Return the cross-entropy of each next token; a batch is (steps + 1, batch)."""

    def step(carry: Any, token: Any) -> Any:
        h, c = carry
        gates = dense(params["cell"], jnp.concatenate([params["tokens"][token], h], axis=-1))
        h, c = lstm_cell(gates, c)
        return (h, c), h

    zeros = jnp.zeros((batch.shape[1], params["tokens"].shape[1]))
    _, h = through(step, (zeros, zeros), batch[:-1])
    return cross_entropy(dense(params["head"], h), batch[1:])


def lstm_model(title: str, toy: bool, steps: int = 256, batch: int = 64) -> Model:
    """Return one layer over a long sequence, whose scan is recomputed in the ways by hand."""
    steps, batch, width, vocabulary = (9, 2, 8, 16) if toy else (steps, batch, 512, 256)
    params = {
        "tokens": array(vocabulary, width),
        "cell": {"w": array(2 * width, 4 * width), "b": array(4 * width)},
        "head": {"w": array(width, vocabulary), "b": array(vocabulary)},
    }
    args = (params, array(steps + 1, batch, dtype=jnp.int32))
    plain = functools.partial(_long_loss, through=jax.lax.scan)
    return Model(title, plain, args, loops(_long_loss, steps), scanned=True)
