"""PyTorch's side of benchmarks of seconds: one way to run a twin, in a process of its own.

Settings: `twin`, `options` and `arguments` as in `_torch.py`; `checkpoint`, whether every block is
under `torch.utils.checkpoint`; `budget`, an `activation_memory_budget` for `torch.compile` with
Inductor, or none for a run without a compiler; `device`, by default the CPU; `dtype`, what
parameters are cast to in the loss. Each answer is of one forward and backward pass. Its bytes are
the most that a pass adds: to resident memory, or on a GPU to what PyTorch's allocator has given.
"""

import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

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
        if dtype := settings.get("dtype"):
            params = tree_map(lambda x: x.to(getattr(torch, dtype)), params)
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
    device = settings.get("device", "cpu")
    given, loss = Arguments(settings["arguments"], device), loss_of(settings)
    added = _added_on_gpu if device == "cuda" else _added_on_cpu

    def one_pass() -> float:
        value = loss(*given.args)
        value.backward()
        return value.item()

    def step() -> dict[str, Any]:
        for leaf in given.leaves:
            leaf.grad = None
        value, seconds, most = added(one_pass)
        norm = float(torch.stack([x.grad.double().norm() for x in given.leaves]).norm())
        found = {"seconds": seconds, "resident": most, "loss": value}
        return found | {"gradient_norm": norm, "torch": torch.__version__}

    for _ in range(WARM_UP):
        step()
    child.serve(step)


def _added_on_cpu(run: Callable[[], float]) -> tuple[float, float, int]:
    """Return a result, seconds, and the bytes that were added to resident memory."""
    reset_most()
    start, began = resident("VmRSS"), time.perf_counter()
    value = run()
    return value, time.perf_counter() - began, resident("VmHWM") - start


def _added_on_gpu(run: Callable[[], float]) -> tuple[float, float, int]:
    """Return a result, seconds, and the bytes that were added on the device."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start, began = torch.cuda.memory_allocated(), time.perf_counter()
    value = run()
    torch.cuda.synchronize()
    return value, time.perf_counter() - began, torch.cuda.max_memory_allocated() - start


if __name__ == "__main__":
    main()
