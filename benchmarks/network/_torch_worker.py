"""PyTorch's processes of `benchmarks.network.steps`: DDP over gloo, dense and with PowerSGD.

Both end in `torch.optim.SGD`. `ddp` is plain DistributedDataParallel; `powersgd` has PyTorch's own
communication hook, of rank 1, with error feedback and warm start, for leaves that it makes smaller
by at least half: matrices and kernels. All others are sent whole, and so is everything in the first
two steps, which are not timed.

The gradients are prepared, as they are for jrc. Backward passes them on, which costs a copy of
each, and DDP's reducer does the rest as in training. PowerSGD takes one bucket at a time: with
several at a time its hook deadlocks on gloo, in the first step that it compresses. It waits for the
factors of one bucket in gloo's own two threads, which the next bucket needs. All in one bucket was
slower.
"""

import datetime
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.network import _bytes as network_bytes
from benchmarks.network._worker import MOMENTUM, RATE, SETS, Answering, digest, serve

# The minimum that the hook accepts with error feedback.
DENSE_STEPS = 2
# Of a process; more was slower where there are as many processes as cores.
THREADS = 1
Shapes = Sequence[tuple[int, ...]]


class _HandOver(torch.autograd.Function):
    """A loss of zero whose gradients are those given."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *leaves: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return leaves[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        return None, *ctx.gradients


class _Leaves(torch.nn.Module):
    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.leaves = torch.nn.ParameterList(torch.zeros(shape) for shape in shapes)

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return _HandOver.apply(gradients, *self.leaves)


class Method:
    """Parameters and optimizer of one way to reduce gradients."""

    def __init__(self, shapes: Shapes) -> None:
        # The default, except for an option that saves a copy.
        self.model = DistributedDataParallel(_Leaves(shapes), gradient_as_bucket_view=True)
        self.tx = torch.optim.SGD(self.model.parameters(), RATE, MOMENTUM, fused=True)
        self.taken = 0

    def step(self, sets: list[list[torch.Tensor]]) -> float:
        """Take one step, from local gradients to new parameters, and return its seconds."""
        gradients = sets[self.taken % len(sets)]
        began = time.perf_counter()
        self.tx.zero_grad()
        self.model(gradients).backward()
        self.tx.step()
        self.taken += 1
        return time.perf_counter() - began


def bucket_after_bucket(
    state: powerSGD_hook.PowerSGDState, bucket: distributed.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Run PyTorch's hook to its end before another bucket begins."""
    reduced = powerSGD_hook.powerSGD_hook(state, bucket)
    reduced.wait()
    return reduced


def compressed(shapes: Shapes) -> Method:
    """Return DDP with PowerSGD."""
    method = Method(shapes)
    add_powersgd(method.model)
    return method


def add_powersgd(model: DistributedDataParallel) -> None:
    """Let DDP reduce with PowerSGD from its third step on."""
    state = powerSGD_hook.PowerSGDState(
        None, network_bytes.RANK, DENSE_STEPS, network_bytes.LEAST_RATE
    )
    model.register_comm_hook(state, bucket_after_bucket)


class TorchAnswering(Answering):
    """A worker that has joined PyTorch's process group."""

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(setup)
        self.count = len(self.addresses)
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface or "lo"
        torch.set_num_threads(THREADS)
        distributed.init_process_group(
            "gloo", f"tcp://{self.at}", datetime.timedelta(minutes=10), self.count, self.rank
        )

    def about(self) -> dict[str, Any]:
        """Return PyTorch's version and threads."""
        return {"torch": torch.__version__, "torch_threads": torch.get_num_threads()}


class Worker(TorchAnswering):
    """Answers requests with PyTorch."""

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(setup)
        self.shapes = [network_bytes.in_torch(shape) for shape in setup["shapes"]]
        self._sets = [self._gradients(i) for i in range(SETS)]
        makers = {"ddp": Method, "powersgd": compressed}
        self._methods = {name: makers[name](self.shapes) for name in setup["methods"]}

    def handing_over(self) -> float:
        """Return the seconds in which a step copies gradients to the reducer, without a network."""
        method = next(iter(self._methods.values()))
        seconds = []
        for gradients in self._sets:
            method.tx.zero_grad()
            began = time.perf_counter()
            with method.model.no_sync():
                method.model(gradients).backward()
            seconds.append(time.perf_counter() - began)
        method.tx.zero_grad()
        return sorted(seconds)[len(seconds) // 2]

    def predicted(self) -> dict[str, float]:
        """Return the bytes that one process sends in a step, from shapes."""
        entries = {
            "ddp": sum(int(np.prod(shape)) for shape in self.shapes),
            "powersgd": network_bytes.powersgd_entries(self.shapes),
        }
        return {name: network_bytes.ring(entries[name], self.count) for name in self._methods}

    def digests(self) -> dict[str, int]:
        """Return a checksum of the parameters of each method."""
        return {
            name: digest(leaf.detach().numpy() for leaf in method.model.parameters())
            for name, method in self._methods.items()
        }

    def _gradients(self, number: int) -> list[torch.Tensor]:
        """Draw a set of gradients, different on each process and in each set."""
        draw = np.random.default_rng((self.rank, number))
        drawn = (draw.standard_normal(shape, np.float32) for shape in self.shapes)
        return [torch.from_numpy(values) for values in drawn]


if __name__ == "__main__":
    serve(Worker)
