"""A GPT: pre-norm blocks, causal softmax attention, dropout with explicit keys.

    >>> import jax, jax.numpy as jnp
    >>> config = Config(layers=2, heads=2, width=16, length=8)
    >>> params = init(jax.random.key(0), config)
    >>> apply(params, jnp.zeros((1, 8), int), config).shape
    (1, 8, 256)

Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, sec. 2.3.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jrc._errors import public
from jrc._typing import AnyArray, Array, Float, Integer, PyTree, RandomKey
from jrc._validate import check_flag, is_real, whole_number
from jrc.models._check import check_apply, check_array, check_init
from jrc.models._layers import (
    cross_entropy,
    dense,
    dense_init,
    dropout,
    layer_norm,
    layer_norm_init,
    split_or_none,
)
from jrc.remat import mark


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a GPT.

    Attributes:
        vocabulary: Number of tokens; 256 for bytes.
        layers: Number of blocks.
        heads: Attention heads; divides `width`.
        width: Size of the residual stream.
        length: Longest sequence.
        dropout: Probability with which embeddings, attention and branch outputs are dropped when
            `apply` is given a key.
        scan: Whether the blocks are one loop, which compiles as fast as a single block. Their
            parameters are then `blocks`, each leaf stacked along a first axis of `layers`.
    """

    vocabulary: int = 256
    layers: int = 4
    heads: int = 4
    width: int = 128
    length: int = 256
    dropout: float = 0.0
    scan: bool = False

    @public("jrc.models.gpt.Config")
    def __post_init__(self) -> None:
        """Check every field."""
        for field in ("vocabulary", "layers", "heads", "width", "length"):
            remedy = "Leave it out for the default."
            whole_number(getattr(self, field), field, least=1, remedy=remedy)
        if self.width % self.heads:
            raise ValueError(
                f"heads must divide width, got heads={self.heads}, width={self.width}. "
                "Choose a width that is a multiple of heads."
            )
        if not is_real(self.dropout) or not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout!r}. 0 drops nothing.")
        check_flag(self.scan, "scan")

    @property
    def boundaries(self) -> tuple[str, ...]:
        """The marks of the blocks' results: `block_0`, `block_1`, …; none with `scan`."""
        return () if self.scan else tuple(f"block_{i}" for i in range(self.layers))


@public("jrc.models.gpt.init")
def init(key: RandomKey, config: Config) -> PyTree:
    """Return float32 `tokens`, `positions`, `block_0` … or `blocks`, `norm` and `head`."""
    check_init(key, config, Config)
    token_key, position_key, head_key, *block_keys = jax.random.split(key, config.layers + 3)
    width = config.width
    return {
        "tokens": jax.random.normal(token_key, (config.vocabulary, width)),
        "positions": jax.random.normal(position_key, (config.length, width)),
        **_init_blocks(block_keys, config),
        "norm": layer_norm_init(width),
        # Small: an untrained model gives every token about the same probability.
        "head": dense_init(head_key, width, config.vocabulary, 0.1),
    }


@public("jrc.models.gpt.apply")
def apply(
    params: PyTree,
    tokens: Integer[AnyArray, "batch length"],
    config: Config,
    *,
    key: RandomKey | None = None,
    loop: Callable[..., Any] = jax.lax.scan,
) -> Float[Array, "batch length vocabulary"]:
    """Return the logits of the next token at every position.

    Args:
        params: The parameters of `init`.
        tokens: Token numbers, int (batch, length), at most `config.length` long.
        config: The config of `init`.
        key: Key for dropout; without one nothing is dropped.
        loop: The loop over the blocks when `config.scan` is set. `functools.partial(
            jrc.recompute_scan, segments=config.layers)` recomputes every block; with fewer
            segments fewer results of blocks are saved.

    Returns:
        Logits (batch, length, vocabulary) in the parameters' dtype.

    Raises:
        TypeError: If `config` is not a `Config`.
        ValueError: If the sequence is longer than `config.length`, tokens are not integers with
            two axes, or the parameters were made for another model.
    """
    check_apply(params, config, Config, _names)
    _check_tokens(tokens)
    length = tokens.shape[-1]
    if length > config.length:
        raise ValueError(
            f"tokens must have at most config.length={config.length} of them in a row, got "
            f"{length}. Cut the rows, or make the model with a larger length."
        )
    keys = split_or_none(key, config.layers + 1)
    embed_key, block_keys = keys[0], keys[1:]
    x = embed(params, tokens, config, key=embed_key)
    if config.scan:
        block_keys = None if key is None else block_keys
        step = lambda x, layer: (block(layer[0], x, config, key=layer[1]), None)  # noqa: E731
        return unembed(params, loop(step, x, (params["blocks"], block_keys))[0])
    for name, block_key in zip(config.boundaries, block_keys, strict=True):
        x = mark(block(params[name], x, config, key=block_key), name)
    return unembed(params, x)


@public("jrc.models.gpt.loss")
def loss(
    params: PyTree,
    batch: Integer[AnyArray, "batch length"],
    key: RandomKey | None = None,
    *,
    config: Config,
    loop: Callable[..., Any] = jax.lax.scan,
) -> Float[Array, ""]:
    """Return the mean cross-entropy, nats, of each token of `batch` given those before it."""
    _check_tokens(batch)
    if batch.shape[1] < 2:
        raise ValueError(
            "batch must have at least two tokens in a row, one to predict, "
            f"got {batch.shape[1]}. Pass longer rows."
        )
    logits = apply(params, batch[:, :-1], config, key=key, loop=loop)
    return cross_entropy(logits, batch[:, 1:])


def _check_tokens(tokens: Any) -> None:
    rule = "tokens must be integers, of shape (batch, length)"
    remedy = "Cut the text into rows of token numbers."
    check_array(tokens, jnp.integer, (None, None), rule, remedy)


def _names(config: Config) -> tuple[str, ...]:
    """Return the names of the parameters that `init` makes."""
    return ("tokens", "positions", *(config.boundaries or ("blocks",)), "norm", "head")


def _init_blocks(keys: Sequence[RandomKey], config: Config) -> PyTree:
    blocks = [_init_block(key, config) for key in keys]
    if config.scan:
        return {"blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)}
    return dict(zip(config.boundaries, blocks, strict=True))


def _init_block(key: RandomKey, config: Config) -> PyTree:
    qkv, out, up, down = jax.random.split(key, 4)
    width = config.width
    # The weights that write to the residual stream shrink with depth, as in GPT-2.
    gain = 1.0 / math.sqrt(2 * config.layers)
    return {
        "norm_1": layer_norm_init(width),
        "qkv": dense_init(qkv, width, 3 * width),
        "out": dense_init(out, width, width, gain),
        "norm_2": layer_norm_init(width),
        "up": dense_init(up, width, 4 * width),
        "down": dense_init(down, 4 * width, width, gain),
    }


def embed(
    params: PyTree,
    tokens: Integer[AnyArray, "b t"],
    config: Config,
    *,
    key: RandomKey | None = None,
) -> Float[Array, "b t d"]:
    """Return the input of the first block: token plus position embeddings."""
    x = params["tokens"][tokens] + params["positions"][None, : tokens.shape[-1]]
    return dropout(x, config.dropout, key)


def unembed(params: PyTree, x: Float[AnyArray, "b t d"]) -> Float[Array, "b t vocabulary"]:
    """Return logits from the output of the last block."""
    return dense(params["head"], layer_norm(params["norm"], x))


def block(
    params: PyTree,
    x: Float[AnyArray, "b t d"],
    config: Config,
    *,
    key: RandomKey | None = None,
) -> Float[Array, "b t d"]:
    """Run one block with the parameters `params["block_i"]`: attention, an MLP of 4 x width."""
    attention_key, branch_key, mlp_key = split_or_none(key, 3)
    branch = _attention(params, layer_norm(params["norm_1"], x), config, attention_key)
    x = x + dropout(branch, config.dropout, branch_key)
    branch = dense(
        params["down"], jax.nn.gelu(dense(params["up"], layer_norm(params["norm_2"], x)))
    )
    return x + dropout(branch, config.dropout, mlp_key)


def _attention(
    params: PyTree, x: Float[Array, "b t d"], config: Config, key: RandomKey | None
) -> Float[Array, "b t d"]:
    batch, length, width = x.shape
    size = width // config.heads
    heads = dense(params["qkv"], x).reshape(batch, length, 3, config.heads, size)
    q, k, v = (heads[:, :, i] for i in range(3))
    scores = jnp.einsum("bqhc,bkhc->bhqk", q, k) / math.sqrt(size)
    causal = jnp.tril(jnp.ones((length, length), bool))[None, None]
    weights = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(scores.dtype).min), axis=-1)
    weights = dropout(weights, config.dropout, key)
    mixed = jnp.einsum("bhqk,bkhc->bqhc", weights, v).reshape(batch, length, width)
    return dense(params["out"], mixed)
