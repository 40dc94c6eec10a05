"""The GPT of `jrc.models.gpt` in PyTorch, with the same products."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

Tensor = torch.Tensor


def dense(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return x w + b."""
    return x @ params["w"] + params["b"]


def norm(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return the layer norm over the last axis."""
    return F.layer_norm(x, x.shape[-1:], params["scale"], params["bias"], 1e-5)


def attention(params: Mapping[str, Any], x: Tensor, mask: Tensor, heads: int) -> Tensor:
    """Return causal softmax attention."""
    size = x.shape[-1] // heads
    q, k, v = dense(params["qkv"], x).unflatten(-1, (3, heads, size)).unbind(2)
    scores = torch.einsum("bqhc,bkhc->bhqk", q, k) / math.sqrt(size)
    weights = scores.masked_fill(mask, torch.finfo(scores.dtype).min).softmax(-1)
    return dense(params["out"], torch.einsum("bhqk,bkhc->bqhc", weights, v).flatten(2))


def block(params: Mapping[str, Any], x: Tensor, mask: Tensor, heads: int) -> Tensor:
    """Return a pre-norm block."""
    x = x + attention(params, norm(params["norm_1"], x), mask, heads)
    inner = F.gelu(dense(params["up"], norm(params["norm_2"], x)), approximate="tanh")
    return x + dense(params["down"], inner)


def in_turn(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Run a group of blocks and save everything."""
    return run(x)


def checkpointed(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Run a group of blocks and recompute it in the backward pass."""
    return checkpoint(run, x, use_reentrant=False)


class Loss:
    """Cross-entropy of the next token; `through` runs every group of `size` blocks.

    The mask is an argument like the batch, as it is a buffer of a module.
    """

    def __init__(self, heads: int, through: Callable[..., Tensor] = in_turn, size: int = 1) -> None:
        self.heads, self.through, self.size = heads, through, size

    def __call__(self, params: Mapping[str, Any], batch: Tensor, mask: Tensor) -> Tensor:
        blocks = [params[f"block_{i}"] for i in range(sum(n.startswith("block_") for n in params))]
        tokens, labels = batch[:, :-1], batch[:, 1:]
        x = params["tokens"][tokens] + params["positions"][: tokens.shape[1]]
        for start in range(0, len(blocks), self.size):
            part = blocks[start : start + self.size]
            x = self.through(functools.partial(self.group, part, mask), x)
        logits = dense(params["head"], norm(params["norm"], x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def group(self, part: Sequence[Mapping[str, Any]], mask: Tensor, x: Tensor) -> Tensor:
        for params in part:
            x = block(params, x, mask, self.heads)
        return x
