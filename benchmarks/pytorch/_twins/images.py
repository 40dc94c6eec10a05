"""Classifiers of images: the vision transformer of flax linen, ResNet-18 of dm-haiku."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.pytorch._twins.blocks import Blocks
from benchmarks.pytorch._twins.nets import conv
from benchmarks.pytorch._twins.transformers import cross_entropy

Tensor = torch.Tensor
Params = Mapping[str, Any]


def vit(run: Blocks, params: Params, inputs: Sequence[Any]) -> Tensor:
    """Return the loss of the vision transformer of `benchmarks/_models/flax_modules.py`."""
    images, labels = inputs[0]
    params = params["params"]
    patches = params["patches"]
    x = conv(patches["kernel"], images, patches["kernel"].shape[0]) + patches["bias"]
    x = x.flatten(1, 2)
    x = x + params["positions"]["embedding"][: x.shape[1]]
    names = [name for name in params if name.startswith("blocks_")]
    x = run.chain([functools.partial(_block, params[f"blocks_{i}"]) for i in range(len(names))], x)
    return cross_entropy(_dense(params["head"], _norm(params["norm"], x).mean(1)), labels)


def resnet18(run: Blocks, params: Params, inputs: Sequence[Tensor]) -> Tensor:
    """Return the loss of `hk.nets.ResNet18` with the statistics of the batch.

    Running means are not updated: no gradient depends on them.
    """
    images, labels = inputs
    body = params["res_net"]["~"]
    x = _batch_norm(body["initial_batchnorm"], conv(body["initial_conv"]["w"], images, 2)).relu()
    pad = F.pad(x.permute(0, 3, 1, 2), (0, 1, 0, 1), value=-math.inf)
    x = F.max_pool2d(pad, 3, 2).permute(0, 2, 3, 1)
    groups = [body[f"block_group_{i}"]["~"] for i in range(4)]
    blocks = [
        functools.partial(_residual, group[f"block_{j}"]["~"], 2 if i and not j else 1)
        for i, group in enumerate(groups)
        for j in range(2)
    ]
    head = body["logits"]
    return cross_entropy(run.chain(blocks, x).mean((1, 2)) @ head["w"] + head["b"], labels)


def _batch_norm(p: Mapping[str, Tensor], x: Tensor) -> Tensor:
    x = x.permute(0, 3, 1, 2)
    scale, offset = p["scale"].flatten(), p["offset"].flatten()
    x = F.batch_norm(x, None, None, scale, offset, training=True, eps=1e-5)
    return x.permute(0, 2, 3, 1)


def _residual(p: Params, stride: int, x: Tensor) -> Tensor:
    y = _batch_norm(p["batchnorm_0"], conv(p["conv_0"]["w"], x, stride)).relu()
    y = _batch_norm(p["batchnorm_1"], conv(p["conv_1"]["w"], y))
    if "shortcut_conv" in p:
        x = _batch_norm(p["shortcut_batchnorm"], conv(p["shortcut_conv"]["w"], x, stride))
    return (x + y).relu()


def _dense(p: Mapping[str, Tensor], x: Tensor) -> Tensor:
    return x @ p["kernel"] + p["bias"]


def _norm(p: Mapping[str, Tensor], x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], p["scale"], p["bias"], 1e-6)


def _block(p: Params, x: Tensor) -> Tensor:
    x = x + _attention(p["MultiHeadDotProductAttention_0"], _norm(p["LayerNorm_0"], x))
    inner = F.gelu(_dense(p["Dense_0"], _norm(p["LayerNorm_1"], x)), approximate="tanh")
    return x + _dense(p["Dense_1"], inner)


def _attention(p: Params, x: Tensor) -> Tensor:
    q, k, v = (
        (x @ p[name]["kernel"].flatten(1)).unflatten(-1, p[name]["bias"].shape) + p[name]["bias"]
        for name in ("query", "key", "value")
    )
    weights = torch.einsum("bqhc,bkhc->bhqk", q / math.sqrt(q.shape[-1]), k).softmax(-1)
    out = torch.einsum("bhqk,bkhc->bqhc", weights, v)
    return out.flatten(2) @ p["out"]["kernel"].flatten(0, 1) + p["out"]["bias"]
