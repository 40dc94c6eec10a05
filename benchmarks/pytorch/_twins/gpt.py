"""The GPT of `jrc.models.gpt`."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.pytorch._twins.blocks import Blocks

Tensor = torch.Tensor


def gpt(run: Blocks, params: Mapping[str, Any], inputs: Sequence[Tensor], *, heads: int) -> Tensor:
    """Return the cross-entropy of the next token.

    The mask is an input like the batch, as it is a buffer of a module.
    """
    batch, mask = inputs
    names = [name for name in params if name.startswith("block_")]
    blocks = [
        functools.partial(_block, params[f"block_{i}"], mask, heads) for i in range(len(names))
    ]
    tokens, labels = batch[:, :-1], batch[:, 1:]
    x = run.chain(blocks, params["tokens"][tokens] + params["positions"][: tokens.shape[1]])
    logits = _dense(params["head"], _norm(params["norm"], x))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _dense(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    return x @ params["w"] + params["b"]


def _norm(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], params["scale"], params["bias"], 1e-5)


def _attention(params: Mapping[str, Any], x: Tensor, mask: Tensor, heads: int) -> Tensor:
    """Return causal softmax attention."""
    size = x.shape[-1] // heads
    q, k, v = _dense(params["qkv"], x).unflatten(-1, (3, heads, size)).unbind(2)
    scores = torch.einsum("bqhc,bkhc->bhqk", q, k) / math.sqrt(size)
    weights = scores.masked_fill(mask, torch.finfo(scores.dtype).min).softmax(-1)
    return _dense(params["out"], torch.einsum("bhqk,bkhc->bqhc", weights, v).flatten(2))


def _block(params: Mapping[str, Any], mask: Tensor, heads: int, x: Tensor) -> Tensor:
    """Return a pre-norm block."""
    x = x + _attention(params, _norm(params["norm_1"], x), mask, heads)
    inner = F.gelu(_dense(params["up"], _norm(params["norm_2"], x)), approximate="tanh")
    return x + _dense(params["down"], inner)
