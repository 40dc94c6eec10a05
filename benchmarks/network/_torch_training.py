"""PyTorch's processes of `benchmarks.network.training`: the same GPT with AdamW, under DDP.

The hook and the threads are those of `_torch_worker`.
"""

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.network import _bytes as network_bytes
from benchmarks.network._torch_worker import DENSE_STEPS, TorchAnswering, add_powersgd
from benchmarks.network._training_methods import CLIP, DECAY, RATE, exchanges
from benchmarks.network._worker import SETS, batches, digest, serve
from benchmarks.pytorch._twins.blocks import Blocks
from benchmarks.pytorch._twins.gpt import gpt

Leaves = Sequence[tuple[str, Sequence[int]]]


class Model(torch.nn.Module):
    """The loss of the GPT as a module."""

    def __init__(self, leaves: Leaves, heads: int) -> None:
        super().__init__()
        self.paths = [path.split("/") for path, _ in leaves]
        draw = torch.Generator().manual_seed(0)
        self.leaves = torch.nn.ParameterList(started(*leaf, draw) for leaf in leaves)
        self.heads = heads

    def forward(self, batch: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch."""
        params: dict[str, Any] = {}
        for path, leaf in zip(self.paths, self.leaves, strict=True):
            inner = params
            for name in path[:-1]:
                inner = inner.setdefault(name, {})
            inner[path[-1]] = leaf
        return gpt(Blocks(), params, (batch, mask), heads=self.heads)


def started(path: str, shape: Sequence[int], draw: torch.Generator) -> torch.Tensor:
    """Return a leaf before training."""
    if len(shape) == 2:
        return torch.randn(tuple(shape), generator=draw) / math.sqrt(shape[0])
    return torch.full(tuple(shape), float(path.endswith("scale")))


class Method:
    """A way to train; its state stays, because DDP and PowerSGD begin with other steps."""

    def __init__(self, name: str, leaves: Leaves, heads: int, mask: torch.Tensor) -> None:
        self.model: torch.nn.Module = Model(leaves, heads)
        self.mask, self.compared = mask, exchanges(name)
        if self.compared:
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        if name == "powersgd":
            add_powersgd(self.model)
        # Fused: one pass over each parameter, as XLA makes of optax.
        self.tx = torch.optim.AdamW(self.model.parameters(), RATE, weight_decay=DECAY, fused=True)
        self.taken, self.last = 0, math.nan

    def step(self, sets: list[torch.Tensor]) -> float:
        """Take one step, from a batch to new parameters, and return its seconds."""
        batch = sets[self.taken % len(sets)]
        began = time.perf_counter()
        self.tx.zero_grad()
        loss = self.model(batch, self.mask)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.tx.step()
        self.last = loss.item()
        self.taken += 1
        return time.perf_counter() - began

    def digest(self) -> int | None:
        """Return the checksum of the parameters, which all processes have in common."""
        if not self.compared:
            return None
        return digest(leaf.detach().numpy() for leaf in self.model.parameters())


class Worker(TorchAnswering):
    """Answers requests with PyTorch."""

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(setup)
        model = setup["model"]
        drawn = (batches(model, self.rank, i) for i in range(SETS))
        self._sets = [torch.from_numpy(tokens).long() for tokens in drawn]
        self._shapes = [shape for _, shape in setup["leaves"]]
        length = model["length"]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        self._methods = {
            name: Method(name, setup["leaves"], model["heads"], mask) for name in setup["methods"]
        }

    def warm_up(self, method: str) -> None:
        """Take the first steps: DDP then arranges its buckets, and PowerSGD compresses."""
        for _ in range(DENSE_STEPS + 1):
            self._methods[method].step(self._sets)

    def begin(self, method: str) -> None:
        """Keep the state."""

    def end(self, method: str) -> dict[str, Any]:
        """Return what is to be compared."""
        at = self._methods[method]
        return {"digest": at.digest(), "bytes": self._predicted(method), "loss": at.last}

    def _predicted(self, method: str) -> float:
        """Return the bytes that one process sends in a step, from shapes."""
        if not exchanges(method):
            return 0.0
        whole = sum(math.prod(shape) for shape in self._shapes)
        low_rank = method == "powersgd"
        entries = network_bytes.powersgd_entries(self._shapes) if low_rank else whole
        return network_bytes.ring(entries, self.count)


if __name__ == "__main__":
    serve(Worker)
