"""Layers of image models. Images are (batch, height, width, channels), kernels HWIO."""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrc._typing import AnyArray, Array, Float, PyTree, RandomKey, Shaped
from jrc.models._layers import dense, over

_MOMENTUM = 0.9
_EPSILON = 1e-5


@dataclasses.dataclass(frozen=True)
class Undrawn:
    """A parameter to be drawn by `draw`: normal numbers of this shape and deviation."""

    shape: tuple[int, ...]
    deviation: float


def draw(key: RandomKey, tree: PyTree) -> PyTree:
    """Return the tree with every `Undrawn` leaf drawn, float32.

    All leaves share one draw: XLA takes minutes to compile dozens of generators.
    """
    leaves, treedef = jax.tree.flatten(tree)
    wanted = [leaf for leaf in leaves if isinstance(leaf, Undrawn)]
    *ends, total = itertools.accumulate(math.prod(leaf.shape) for leaf in wanted)
    parts = jnp.split(jax.random.normal(key, (total,)), ends)
    made = (
        part.reshape(leaf.shape) * leaf.deviation for leaf, part in zip(wanted, parts, strict=True)
    )
    return treedef.unflatten(next(made) if isinstance(x, Undrawn) else x for x in leaves)


def conv_init(size: int, inputs: int, outputs: int) -> Undrawn:
    """Return a kernel with variance 2 / (size² inputs), for a relu after it.

    Source: He et al., "Delving Deep into Rectifiers", arXiv 1502.01852, sec. 2.2.
    """
    return Undrawn((size, size, inputs, outputs), math.sqrt(2.0 / (size * size * inputs)))


def dense_init(inputs: int, outputs: int) -> dict[str, Undrawn | Array]:
    """Return weights `w` (inputs, outputs), variance 1/inputs, and a zero bias `b` (outputs,)."""
    return {"w": Undrawn((inputs, outputs), 1 / math.sqrt(inputs)), "b": jnp.zeros(outputs)}


def conv(
    kernel: Float[AnyArray, "k k i o"], x: Float[AnyArray, "b h w i"], stride: int = 1
) -> Float[Array, "b -(-h//{stride}) -(-w//{stride}) o"]:
    """Convolve in the dtype of `x`, with k // 2 zeros on every side of an odd kernel."""
    sides = [(size // 2, size // 2) for size in kernel.shape[:2]]
    return jax.lax.conv_general_dilated(
        x,
        kernel.astype(x.dtype),
        (stride, stride),
        sides,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def max_pool(x: Float[AnyArray, "b h w c"]) -> Float[Array, "b -(-h//2) -(-w//2) c"]:
    """Return the largest of 3 x 3 neighbours, with stride 2."""
    sides = ((0, 0), (1, 1), (1, 1), (0, 0))
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), sides)


def average(x: Float[AnyArray, "b h w c"]) -> Float[Array, "b c"]:
    """Return the mean over height and width, at least in float32."""
    return jnp.mean(_wide(x), axis=(1, 2))


def batch_norm_init(width: int, scale: float = 1.0) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return parameters `scale`, `bias` and state `mean`, `variance`, all float32 (width,)."""
    params = {"scale": jnp.full(width, scale), "bias": jnp.zeros(width)}
    return params, {"mean": jnp.zeros(width), "variance": jnp.ones(width)}


def batch_norm(
    params: Mapping[str, Shaped[AnyArray, "..."]],
    state: Mapping[str, Shaped[AnyArray, "..."]],
    x: Float[AnyArray, "b h w c"],
    train: bool,
) -> tuple[Float[Array, "b h w c"], Mapping[str, Shaped[AnyArray, "..."]]]:
    """Normalise every channel to mean 0 and variance 1, then scale and shift.

    Training uses the mean and (biased) variance of the batch, and moves the state a tenth of the
    way towards them; otherwise those of the state are used. All of it is at least in float32.

    Source: Ioffe and Szegedy, "Batch Normalization", arXiv 1502.03167, algorithm 1.
    """
    wide = _wide(x)
    mean, variance = state["mean"], state["variance"]
    if train:
        mean = jnp.mean(wide, axis=(0, 1, 2))
        variance = jnp.mean((wide - over(mean, wide)) ** 2, axis=(0, 1, 2))
        found = {"mean": mean, "variance": variance}
        state = {name: _towards(old, found[name]) for name, old in state.items()}
    scale = params["scale"] * jax.lax.rsqrt(variance + _EPSILON)
    y = (wide - over(mean, wide)) * over(scale, wide) + over(params["bias"], wide)
    return y.astype(x.dtype), state


def squeeze_excitation_init(width: int, reduction: int) -> PyTree:
    """Return two dense layers, `squeeze` to width / reduction and `excite` back."""
    inner = width // reduction
    return {"squeeze": dense_init(width, inner), "excite": dense_init(inner, width)}


def squeeze_excitation(params: PyTree, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
    """Scale every channel of an image by a gate computed from the mean of each channel.

    Source: Hu et al., "Squeeze-and-Excitation Networks", arXiv 1709.01507, sec. 3.
    """
    gate = jax.nn.relu(dense(params["squeeze"], average(x)))
    gate = jax.nn.sigmoid(dense(params["excite"], gate)).astype(x.dtype)
    return x * jax.lax.expand_dims(gate, (1, 2))


def _wide(x: Array | np.ndarray) -> Any:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _towards(old: Any, new: Array) -> Array:
    return (_MOMENTUM * old + (1.0 - _MOMENTUM) * new).astype(old.dtype)
