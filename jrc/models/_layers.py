"""Layers of several models. Broadcasts are explicit, because users may forbid rank promotion."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrc._typing import AnyArray, Array, Float, Integer, Num, RandomKey, Shaped


def dense_init(key: RandomKey, inputs: int, outputs: int, gain: float = 1.0) -> dict[str, Array]:
    """Return `w` (inputs, outputs) with variance gain²/inputs, and a zero bias `b` (outputs,)."""
    w = jax.random.normal(key, (inputs, outputs)) * (gain / math.sqrt(inputs))
    return {"w": w, "b": jnp.zeros(outputs)}


def dense(
    params: Mapping[str, Shaped[AnyArray, "..."]], x: Num[AnyArray, "*batch i"]
) -> Float[Array, "*batch o"]:
    """Return `x @ w + b`."""
    return x @ params["w"] + over(params["b"], x)


def over(vector: Float[AnyArray, " n"], x: Array | np.ndarray) -> Array:
    """Return a vector with leading axes of 1, to act on the last axis of `x`."""
    return jax.lax.expand_dims(vector, range(x.ndim - vector.ndim))


def layer_norm_init(width: int) -> dict[str, Array]:
    """Return `scale` of ones and `bias` of zeros, both (width,)."""
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}


def layer_norm(
    params: Mapping[str, Shaped[AnyArray, "..."]], x: Float[AnyArray, "*batch d"]
) -> Float[Array, "*batch d"]:
    """Normalise the last axis to mean 0 and variance 1, then scale and shift."""
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean((x - mean) ** 2, axis=-1, keepdims=True)
    x = (x - mean) * jax.lax.rsqrt(variance + 1e-5)
    return x * over(params["scale"], x) + over(params["bias"], x)


def dropout(
    x: Float[Array, "*shape"], rate: float, key: RandomKey | None
) -> Float[Array, "*shape"]:
    """Zero each entry with probability `rate` and scale the rest; without a key, return `x`."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


def cross_entropy(
    logits: Float[Array, "*batch classes"], labels: Integer[AnyArray, "*batch"]
) -> Float[Array, ""]:
    """Return the mean of -log p(label), in nats."""
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def split_or_none(key: RandomKey | None, count: int) -> Any:
    """Return `count` keys, or as many Nones without a key."""
    return [None] * count if key is None else jax.random.split(key, count)
