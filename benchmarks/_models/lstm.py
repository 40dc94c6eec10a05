"""A language model of two LSTM layers as pure functions, the smallest form of the paper's.

    >>> import jax, jax.numpy as jnp
    >>> params = init(jax.random.key(0), width=8)
    >>> loss(params, jnp.zeros((2, 5), int)).shape
    ()

Every sequence starts from a state of zeros. Parameters: `tokens`, `layer_1`, `layer_2`, `head`.

Source: Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997; Zaremba, Sutskever and Vinyals,
"Recurrent Neural Network Regularization", arXiv 1409.2329, section 3.1, without dropout.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

VOCABULARY = 256
LAYERS = ("layer_1", "layer_2")


def init(key: jax.Array, width: int) -> dict[str, Any]:
    """Parameters, float32: embedding, two layers of `width` cells each, and an output layer."""
    token_key, head_key, *layer_keys = jax.random.split(key, 2 + len(LAYERS))
    layers = {name: _init_layer(k, width) for name, k in zip(LAYERS, layer_keys, strict=True)}
    return {
        "tokens": jax.random.normal(token_key, (VOCABULARY, width)),
        **layers,
        # Small, so that an untrained model gives every byte about the same probability.
        "head": {
            "w": jax.random.normal(head_key, (width, VOCABULARY)) * (0.1 / math.sqrt(width)),
            "b": jnp.zeros(VOCABULARY),
        },
    }


def _init_layer(key: jax.Array, width: int) -> dict[str, jax.Array]:
    """Weights of the four gates, in, forget, candidate and out; one forgets little at first."""
    keys = jax.random.split(key)
    scale = 1.0 / math.sqrt(width)
    names = ("input", "hidden")
    shape = (width, 4 * width)
    weights = {
        name: scale * jax.random.normal(k, shape) for name, k in zip(names, keys, strict=True)
    }
    return {**weights, "b": jnp.zeros((4, width)).at[1].set(1.0).reshape(-1)}


def apply(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """Logits `(batch, length, 256)` of the next byte at every position of `(batch, length)`."""
    # Time first: a loop reads along the leading axis.
    x = params["tokens"][tokens.T]
    for name in LAYERS:
        x = _layer(params[name], x)
    logits = x @ params["head"]["w"] + params["head"]["b"][None, None]
    return logits.transpose(1, 0, 2)


def _layer(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """What the cells return, `(length, batch, width)` from the same."""
    # The products with the input do not wait for each other.
    inputs = x @ params["input"] + params["b"][None, None]

    def step(state: tuple[jax.Array, jax.Array], gates: jax.Array) -> Any:
        h, c = state
        i, f, g, o = jnp.split(gates + h @ params["hidden"], 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    # Zeros that vary with the batch wherever it varies, as the states after them do.
    zeros = jnp.zeros_like(x[0])
    return jax.lax.scan(step, (zeros, zeros), inputs)[1]


def loss(params: dict[str, Any], batch: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """Mean cross-entropy in nats of each byte of `(batch, length + 1)` from those before it."""
    del key
    logits, targets = apply(params, batch[:, :-1]), batch[:, 1:]
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)
