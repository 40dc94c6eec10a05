"""What benchmarks share with the examples, whose scripts import one another by file name."""

import sys

from benchmarks._lib.child import ROOT

sys.path.append(str(ROOT / "examples"))

import common as common  # noqa: E402
import pictures as pictures  # noqa: E402
import train_gpt as train_gpt  # noqa: E402
from lstm import lstm_cell as lstm_cell  # noqa: E402
from train_gpt import batch_at as batch_at  # noqa: E402
from train_gpt import read_text as read_text  # noqa: E402
from train_gpt import split_text as split_text  # noqa: E402
from train_resnet import Source as Source  # noqa: E402
