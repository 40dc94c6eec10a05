"""A Llama as a pure function: its layers are scanned, parameters float32, products in bfloat16.

>>> params = shapes(Sizes(layers=2, width=32, heads=4, groups=2, hidden=64, vocabulary=128))
>>> params["layers"]["query"].shape, params["tokens"].shape
((2, 32, 32), (128, 32))

Source: Touvron et al., "LLaMA", arXiv 2302.13971; Grattafiori et al., "The Llama 3 herd of models",
arXiv 2407.21783, table 3, and the sizes of Llama 3.2 1B. Intermediates have the names that MaxText
gives them, its `qkv_proj` for each of the three products; a name alone changes nothing.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from benchmarks._private import cross_entropy


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a Llama; by default those of Llama 3.2 1B.

    Attributes:
        layers: Number of layers.
        width: Entries of a token.
        heads: Heads of the queries.
        groups: Heads of keys and values.
        hidden: Entries inside of the gated product.
        vocabulary: Number of tokens.
        length: Tokens of a sequence.
        tied: Whether logits are products with the table of tokens.
    """

    layers: int = 16
    width: int = 2048
    heads: int = 32
    groups: int = 8
    hidden: int = 8192
    vocabulary: int = 128_256
    length: int = 2048
    tied: bool = True


def shapes(sizes: Sizes) -> dict[str, Any]:
    """Return the shapes of all parameters."""
    shape = lambda *size: jax.ShapeDtypeStruct(size, jnp.float32)  # noqa: E731
    d, n = sizes.width, sizes.layers
    shared = d * sizes.groups // sizes.heads
    layer = {
        "query": shape(n, d, d),
        "key": shape(n, d, shared),
        "value": shape(n, d, shared),
        "out": shape(n, d, d),
        "gate": shape(n, d, sizes.hidden),
        "up": shape(n, d, sizes.hidden),
        "down": shape(n, sizes.hidden, d),
        "norm": shape(n, d),
        "norm_2": shape(n, d),
    }
    found = {"tokens": shape(sizes.vocabulary, d), "norm": shape(d), "layers": layer}
    return found if sizes.tied else found | {"head": shape(d, sizes.vocabulary)}


def specs(params: Any, hybrid: bool) -> Any:
    """Return how parameters are split over the axes fsdp and model.

    Args:
        params: Parameters or their shapes.
        hybrid: Whether the step is a `shard_map` over a third axis, in which XLA cannot look up
            tokens in a table that is split along the vocabulary.
    """

    def spec(path: Any, x: Any) -> P:
        name = path[-1].key
        if name.startswith("norm"):
            return P()
        if name == "head":
            return P("fsdp", "model")
        if name == "tokens":
            return P(None, ("fsdp", "model")) if hybrid else P("model", "fsdp")
        return P(None, "model", "fsdp") if name in ("out", "down") else P(None, "fsdp", "model")

    return jax.tree.map_with_path(spec, params)


def loss(
    params: Any,
    tokens: Any,
    key: Any = None,
    *,
    sizes: Sizes,
    wrap: Callable[..., Any] = lambda block: block,
) -> Any:
    """Return the mean cross-entropy of the next token.

    Args:
        params: As of `shapes`.
        tokens: `int32[batch, length + 1]`.
        key: Not used: there is no dropout.
        sizes: The sizes.
        wrap: What becomes of a layer before it is scanned, such as `jax.checkpoint`.
    """
    table = params["tokens"].astype(jnp.bfloat16)
    x = _by_examples(table[tokens[:, :-1]])
    one = wrap(functools.partial(_layer, sizes))
    x, _ = jax.lax.scan(lambda x, layer: (one(x, layer), None), x, params["layers"])
    head = table.T if sizes.tied else params["head"].astype(jnp.bfloat16)
    logits = _normed(x, params["norm"]) @ head
    return cross_entropy(logits.astype(jnp.float32), tokens[:, 1:])


def _layer(sizes: Sizes, x: Any, layer: Any) -> Any:
    layer = jax.tree.map(lambda w: w.astype(jnp.bfloat16), layer)
    x = x + _attention(sizes, _normed(x, layer["norm"]), layer)
    h = _normed(x, layer["norm_2"])
    gate, up = (checkpoint_name(h @ layer[name], "mlpwi") for name in ("gate", "up"))
    down = checkpoint_name((jax.nn.silu(gate) * up) @ layer["down"], "mlpwo")
    return _by_examples(x + down)


def _by_examples(x: Any) -> Any:
    """Split activations by examples; XLA would split them as the parameters' widths are."""
    return jax.lax.with_sharding_constraint(x, P("fsdp"))


def _attention(sizes: Sizes, x: Any, layer: Any) -> Any:
    batch, length, width = x.shape
    size = width // sizes.heads
    split = lambda y: y.reshape(batch, length, -1, size)  # noqa: E731
    products = (checkpoint_name(x @ layer[name], "qkv_proj") for name in ("query", "key", "value"))
    query, keys, values = map(split, products)
    query, keys = _rotated(query), _rotated(keys)
    query = query.reshape(batch, length, sizes.groups, -1, size)
    scores = jnp.einsum("btghd,bsgd->bghts", query, keys).astype(jnp.float32) * size**-0.5
    mask = jnp.tril(jnp.ones((length, length), bool))[None, None, None]
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)).astype(x.dtype)
    read = jnp.einsum("bghts,bsgd->btghd", weights, values)
    read = checkpoint_name(read.reshape(batch, length, width), "context")
    return checkpoint_name(read @ layer["out"], "out_proj")


def _rotated(x: Any) -> Any:
    """Rotate pairs of entries by angles that grow with the position."""
    half = x.shape[-1] // 2
    rates = 500_000.0 ** (-jnp.arange(half) / half)
    angles = (jnp.arange(x.shape[1])[:, None] * rates[None])[None, :, None]
    sine, cosine = jnp.sin(angles).astype(x.dtype), jnp.cos(angles).astype(x.dtype)
    one, other = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([one * cosine - other * sine, one * sine + other * cosine], axis=-1)


def _normed(x: Any, scale: Any) -> Any:
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return (x * jax.lax.rsqrt(mean + 1e-5).astype(x.dtype)) * scale.astype(x.dtype)[None, None]
