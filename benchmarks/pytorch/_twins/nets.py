"""The nets of `tests/zoo/plain_nets.py` whose blocks read results of blocks far before them.

Images are [batch, height, width, channels] as in JAX; PyTorch's own order is a view of that.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.pytorch._twins.blocks import Blocks
from benchmarks.pytorch._twins.transformers import cross_entropy

Tensor = torch.Tensor
Params = Mapping[str, Any]


def mirrored_mlp(run: Blocks, params: Sequence[Any], inputs: Sequence[Tensor]) -> Tensor:
    """Return the loss of an MLP with skips from its first half to the mirrored layer."""
    (x,) = inputs
    half, skips = len(params) // 2, []
    for p in params[:half]:
        x = run(_layer, p, x)
        skips.append(x)
    for p in params[half:]:
        x = run(_layer, p, x, skips.pop())
    return (x**2).mean()


def unet(run: Blocks, params: Params, inputs: Sequence[Tensor]) -> Tensor:
    """Return the loss of a U-Net."""
    x, clean = inputs
    skips = []
    for i, p in enumerate(params["down"]):
        x = run(_twice, p, x[:, ::2, ::2] if i else x)
        skips.append(x)
    for p, skip in zip(params["up"], skips[-2::-1], strict=True):
        x = run(_climb, p, x, skip)
    return ((conv(params["head"], x) - clean) ** 2).mean()


def densenet(run: Blocks, params: Params, inputs: Sequence[Tensor]) -> Tensor:
    """Return the loss of layers that read the results of all layers before them."""
    image, labels = inputs
    found = [conv(params["stem"], image)]
    for w in params["layers"]:
        found.append(run(_dense_layer, w, *found))
    x = torch.cat(found, dim=-1).mean((1, 2))
    return cross_entropy(x @ params["head"], labels)


def conv(w: Tensor, x: Tensor, stride: int = 1) -> Tensor:
    """Return a convolution with the padding that JAX calls SAME; w is [height, width, in, out]."""
    pads: list[int] = []
    for size, taps in zip(x.shape[2:0:-1], (w.shape[1], w.shape[0]), strict=True):
        whole = max((-(-size // stride) - 1) * stride + taps - size, 0)
        pads += [whole // 2, whole - whole // 2]
    x, w = x.permute(0, 3, 1, 2), w.permute(3, 2, 0, 1)
    if pads[0] == pads[1] and pads[2] == pads[3]:
        return F.conv2d(x, w, None, stride, (pads[2], pads[0])).permute(0, 2, 3, 1)
    return F.conv2d(F.pad(x, pads), w, None, stride).permute(0, 2, 3, 1)


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-5)


def _layer(p: Sequence[Tensor], x: Tensor, skip: Tensor | None = None) -> Tensor:
    y = _norm(x if skip is None else x + skip)
    return x + torch.tanh(F.gelu(y @ p[0], approximate="tanh") @ p[1])


def _twice(p: Sequence[Tensor], x: Tensor) -> Tensor:
    for w in p:
        x = F.silu(_norm(conv(w, x)))
    return x


def _climb(p: Sequence[Tensor], x: Tensor, skip: Tensor) -> Tensor:
    x = x.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
    return _twice(p, torch.cat([x, skip], dim=-1))


def _dense_layer(w: Tensor, *before: Tensor) -> Tensor:
    return conv(w, _norm(torch.cat(before, dim=-1)).relu())
