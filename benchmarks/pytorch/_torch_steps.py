"""PyTorch's side of `benchmarks.pytorch.seconds`: one way to run a twin, in a process of its own.

Settings: `twin`, `options` and `arguments` as in `_torch.py`; `checkpoint`, whether every block is
under `torch.utils.checkpoint`; `budget`, an `activation_memory_budget` for `torch.compile` with
Inductor, or none for a run without a compiler. Each answer is of one forward and backward pass.
"""

import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks._lib import child
from benchmarks._lib.resident_memory import reset_most, resident
from benchmarks.pytorch._torch import Arguments, Loss
from benchmarks.pytorch._twins.blocks import Blocks
from benchmarks.pytorch._twins.catalogue import TWINS

WARM_UP = 2


def loss_of(settings: Mapping[str, Any]) -> Loss:
    """Return the loss in the way that the settings say."""
    twin, run = TWINS[settings["twin"]], Blocks(settings["checkpoint"])

    def loss(params: Any, inputs: Any) -> torch.Tensor:
        return twin(run, params, inputs, **settings["options"])

    if settings["budget"] is None:
        return loss
    import torch._functorch.config as config

    config.activation_memory_budget = settings["budget"]
    return torch.compile(loss, fullgraph=True)


def main() -> None:
    """Answer requests for a pass."""
    settings = child.settings()
    warnings.simplefilter("ignore")
    given, loss = Arguments(settings["arguments"]), loss_of(settings)

    def step() -> dict[str, Any]:
        for leaf in given.leaves:
            leaf.grad = None
        reset_most()
        start, began = resident("VmRSS"), time.perf_counter()
        value = loss(*given.args)
        value.backward()
        seconds = time.perf_counter() - began
        most = resident("VmHWM") - start
        norm = float(torch.stack([x.grad.double().norm() for x in given.leaves]).norm())
        found = {"seconds": seconds, "resident": most, "loss": value.item()}
        return found | {"gradient_norm": norm, "torch": torch.__version__}

    for _ in range(WARM_UP):
        step()
    child.serve(step)


if __name__ == "__main__":
    main()
