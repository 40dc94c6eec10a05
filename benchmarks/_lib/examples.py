"""What benchmarks take from the examples, which are scripts beside each other."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))

import common  # noqa: E402
import train_gpt  # noqa: E402
from common import pyplot, write_json  # noqa: E402
from train_gpt import batch_at, read_text, split_text  # noqa: E402
from train_resnet import Source  # noqa: E402

__all__ = [
    "Source", "batch_at", "common", "pyplot", "read_text", "split_text", "train_gpt", "write_json"
]  # fmt: skip
