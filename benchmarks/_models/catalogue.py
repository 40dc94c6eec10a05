"""All models of the benchmarks, by name."""

import functools
from collections.abc import Callable, Mapping

from benchmarks._models.flax_modules import linen_model, nnx_model
from benchmarks._models.lstm import lstm_model
from benchmarks._models.model import Model
from benchmarks._models.residual import resnet_model
from benchmarks._models.transformer import gpt_model
from benchmarks._models.unet import unet_model
from benchmarks._models.uneven import mlp_model

MODELS: Mapping[str, Callable[[bool], Model]] = {
    "gpt": functools.partial(gpt_model, "GPT, unrolled"),
    "gpt_scanned": functools.partial(gpt_model, "GPT, scanned", scan=True),
    "gpt_dropout": functools.partial(gpt_model, "GPT with dropout", dropout=0.1),
    "resnet": functools.partial(resnet_model, "ResNet-50"),
    "unet": functools.partial(unet_model, "U-Net"),
    "lstm": functools.partial(lstm_model, "LSTM, 256 steps"),
    "mlp": functools.partial(mlp_model, "uneven MLP"),
    "linen": functools.partial(linen_model, "linen ViT"),
    "nnx": functools.partial(nnx_model, "nnx MLP-Mixer"),
}
"""Each builds its model at full size, or tiny with `True`."""
