"""All twins, by the name of their program."""

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.pytorch._twins import images, nets, transformers
from benchmarks.pytorch._twins.gpt import gpt

TWINS: Mapping[str, Callable[..., Any]] = {
    "gpt": gpt,
    "masked_transformer": transformers.masked,
    "rotary_transformer": transformers.rotary,
    "encoder_decoder": transformers.encoder_decoder,
    "linen_vit": images.vit,
    "mirrored_mlp": nets.mirrored_mlp,
    "unet": nets.unet,
    "densenet": nets.densenet,
    "hk_resnet18": images.resnet18,
}
