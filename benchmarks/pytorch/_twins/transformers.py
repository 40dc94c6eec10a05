"""The transformers of `tests/zoo/plain_transformers.py`: mask and tables are made in the loss."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.pytorch._twins.blocks import Blocks

Tensor = torch.Tensor
Params = Mapping[str, Any]
Tables = tuple[Tensor, Tensor]


def masked(run: Blocks, params: Params, inputs: Sequence[Tensor], *, heads: int) -> Tensor:
    """Return the loss of a transformer whose blocks read a mask that is made once."""
    return _causal_loss(run, params, inputs[0], heads)


def rotary(run: Blocks, params: Params, inputs: Sequence[Tensor], *, heads: int) -> Tensor:
    """Return the loss of a transformer whose blocks read rotary tables and a mask."""
    (batch,) = inputs
    half = params["embed"].shape[1] // heads // 2
    rates = 10000.0 ** (-torch.arange(half) / half)
    angles = torch.arange(batch.shape[1] - 1)[:, None] * rates
    return _causal_loss(run, params, batch, heads, (angles.sin(), angles.cos()))


def encoder_decoder(run: Blocks, params: Params, inputs: Sequence[Tensor], *, heads: int) -> Tensor:
    """Return the loss of a decoder whose blocks all read the encoder's result."""
    source, batch = inputs
    memory = params["embed"][source]
    for p in params["blocks"]:
        memory = run(functools.partial(_block, heads=heads), p, memory, None)
    memory, mask, x = _norm(memory), _causal(batch), params["embed"][batch[:, :-1]]
    for p in params["decoder"]:
        x = run(functools.partial(_decoder_block, heads=heads), p, x, memory, mask)
    return cross_entropy(_norm(x) @ params["head"], batch[:, 1:])


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of the negative log-likelihoods."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def _causal_loss(
    run: Blocks, params: Params, batch: Tensor, heads: int, tables: Tables | None = None
) -> Tensor:
    mask, x = _causal(batch), params["embed"][batch[:, :-1]]
    for p in params["blocks"]:
        x = run(functools.partial(_block, heads=heads), p, x, mask, tables)
    return cross_entropy(_norm(x) @ params["head"], batch[:, 1:])


def _causal(batch: Tensor) -> Tensor:
    length = batch.shape[1] - 1
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    return mask.expand(len(batch), length, length)


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-5)


def _block(
    p: Params, x: Tensor, mask: Tensor | None, tables: Tables | None = None, *, heads: int
) -> Tensor:
    y = _norm(x)
    q, k, v = (_split(y @ p[name], heads) for name in "qkv")
    if tables is not None:
        q, k = _rotated(q, tables), _rotated(k, tables)
    x = x + _attend(q, k, v, mask) @ p["o"]
    return x + _feed_forward(p, x)


def _decoder_block(p: Params, x: Tensor, memory: Tensor, mask: Tensor, *, heads: int) -> Tensor:
    y = _norm(x)
    q, k, v = (_split(y @ p[name], heads) for name in "qkv")
    x = x + _attend(q, k, v, mask) @ p["o"]
    q = _split(_norm(x) @ p["cq"], heads)
    k, v = (_split(memory @ p[name], heads) for name in ("ck", "cv"))
    x = x + _attend(q, k, v, None) @ p["co"]
    return x + _feed_forward(p, x)


def _feed_forward(p: Params, x: Tensor) -> Tensor:
    return F.gelu(_norm(x) @ p["up"], approximate="tanh") @ p["down"]


def _split(x: Tensor, heads: int) -> Tensor:
    """Return [batch, heads, length, width of a head]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = torch.where(mask[:, None], scores, -1e9)
    out = torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)
    return out.transpose(1, 2).flatten(2)


def _rotated(x: Tensor, tables: Tables) -> Tensor:
    sin, cos = tables
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
