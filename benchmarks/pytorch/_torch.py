"""PyTorch's side of `peers.py`: the same GPT, in a process of its own that never sees JAX.

    python benchmarks/peers_torch.py given.npz '{"heads": 8, "budgets": [1.0, 0.5], "blocks": [1]}'

`given.npz` holds the parameters (`block_0/qkv/w`) and `batch`; `blocks` is how many of them a
checkpoint spans. Prints a line of JSON for each way: saved bytes, product FLOPs, the loss, and how
far its gradients are from those with nothing re-run; the last line is about all of them.

Everything runs for real. Saved bytes are of the storages that forward hands to backward, each once,
without those of parameters, batch and mask. FLOPs are those of `FlopCounterMode`, which counts
matrix products alone. A budget goes through `torch.compile`, with Inductor's decompositions and the
partitioner that it uses, all switches of both as they are by default (solver: `dp`); what comes out
is interpreted, not made into C++. Inductor's pattern for fused attention is left out: the products
that it hides would be counted otherwise.
"""

import contextlib
import functools
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

Tensor = torch.Tensor


# --- the model: every product as in `jrc/models/gpt.py` ----------------------------------------


def dense(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    return x @ params["w"] + params["b"]


def norm(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], params["scale"], params["bias"], 1e-5)


def attention(params: Mapping[str, Any], x: Tensor, mask: Tensor, heads: int) -> Tensor:
    size = x.shape[-1] // heads
    q, k, v = dense(params["qkv"], x).unflatten(-1, (3, heads, size)).unbind(2)
    scores = torch.einsum("bqhc,bkhc->bhqk", q, k) / math.sqrt(size)
    weights = scores.masked_fill(mask, torch.finfo(scores.dtype).min).softmax(-1)
    return dense(params["out"], torch.einsum("bhqk,bkhc->bqhc", weights, v).flatten(2))


def block(params: Mapping[str, Any], x: Tensor, mask: Tensor, heads: int) -> Tensor:
    x = x + attention(params, norm(params["norm_1"], x), mask, heads)
    inner = F.gelu(dense(params["up"], norm(params["norm_2"], x)), approximate="tanh")
    return x + dense(params["down"], inner)


def in_turn(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return run(x)


def checkpointed(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(run, x, use_reentrant=False)


class Loss:
    """Cross-entropy of the next token; `through` runs every group of `size` blocks.

    The mask is an argument like the batch, as a module has it in a buffer.
    """

    def __init__(self, heads: int, through: Callable[..., Tensor] = in_turn, size: int = 1) -> None:
        self.heads, self.through, self.size = heads, through, size

    def __call__(self, params: Mapping[str, Any], batch: Tensor, mask: Tensor) -> Tensor:
        blocks = [params[f"block_{i}"] for i in range(sum(n.startswith("block_") for n in params))]
        tokens, labels = batch[:, :-1], batch[:, 1:]
        x = params["tokens"][tokens] + params["positions"][: tokens.shape[1]]
        for start in range(0, len(blocks), self.size):
            part = blocks[start : start + self.size]
            x = self.through(functools.partial(self.group, part, mask), x)
        logits = dense(params["head"], norm(params["norm"], x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def group(self, part: Sequence[Mapping[str, Any]], mask: Tensor, x: Tensor) -> Tensor:
        for params in part:
            x = block(params, x, mask, self.heads)
        return x


# --- what is measured ---------------------------------------------------------------------------


class Given:
    """Arguments, and the gradients that every way must have."""

    def __init__(self, path: str) -> None:
        self.params: dict[str, Any] = {}
        self.leaves: list[Tensor] = []
        with np.load(path) as arrays:
            self.batch = torch.from_numpy(arrays["batch"]).long()
            for name in (name for name in arrays.files if name != "batch"):
                self.leaves.append(torch.from_numpy(arrays[name]).requires_grad_())
                *path_to, last = name.split("/")
                room = self.params
                for each in path_to:
                    room = room.setdefault(each, {})
                room[last] = self.leaves[-1]
        length = self.batch.shape[1] - 1
        self.mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        self.own = set(storages([*self.leaves, self.batch, self.mask]))
        self.plain: list[Tensor] = []

    @property
    def args(self) -> tuple[Any, Tensor, Tensor]:
        return self.params, self.batch, self.mask

    def gradients_differ(self) -> float:
        """The largest difference to the first ones taken, relative to a leaf's largest entry."""
        found = [leaf.grad for leaf in self.leaves]
        for leaf in self.leaves:
            leaf.grad = None
        self.plain = self.plain or found
        return max(
            float((x - y).abs().max() / x.abs().max().clamp_min(1e-30))
            for x, y in zip(self.plain, found, strict=True)
        )


def storages(tensors: Any) -> dict[int, int]:
    """The bytes of each storage, by its address; only while the tensors live."""
    found = [x.untyped_storage() for x in tensors if isinstance(x, Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def written_out(loss: Loss, given: Given) -> dict[str, Any]:
    """A way without a compiler: what autograd itself holds."""
    held: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        held.append(x.detach())
        return x

    with FlopCounterMode(display=False) as counter:
        with saved_tensors_hooks(pack, lambda x: x):
            value = loss(*given.args)
        saved = storages(held)
        held.clear()
        value.backward()
    return row(saved, given, counter.get_total_flops(), value)


def row(saved: dict[int, int], given: Given, flops: int, value: Tensor) -> dict[str, Any]:
    return {
        "saved": sum(size for address, size in saved.items() if address not in given.own),
        "product_flops": flops,
        "loss": value.item(),
        "gradients_differ": given.gradients_differ(),
    }


class Compiled:
    """The graphs of one compilation as they run: what is handed over, and products."""

    def __init__(self) -> None:
        self.saved: dict[int, int] = {}
        self.flops = 0

    def backend(self) -> Callable[..., Any]:
        from functorch.compile import min_cut_rematerialization_partition
        from torch._dynamo.backends.common import aot_autograd
        from torch._inductor.decomposition import select_decomp_table

        return aot_autograd(
            fw_compiler=functools.partial(self.graph, self.handed_over),
            bw_compiler=functools.partial(self.graph, lambda outs: None),
            decompositions=select_decomp_table(),
            partition_fn=functools.partial(
                min_cut_rematerialization_partition, compiler="inductor"
            ),
        )

    def graph(self, look: Callable[[Any], None], module: Any, _: Any) -> Callable[..., Any]:
        from functorch.compile import make_boxed_func

        # A module that is called would have the hooks by which the counter tells modules apart.
        run = torch.fx.Interpreter(module).run

        def counted(*args: Any) -> Any:
            with FlopCounterMode(display=False) as counter:
                outs = run(*args)
            self.flops += counter.get_total_flops()
            look(outs)
            return outs

        return make_boxed_func(counted)

    def handed_over(self, outs: Sequence[Any]) -> None:
        """The first result of the forward graph is the loss."""
        self.saved = storages(outs[1:])


def within(budget: float, given: Given, heads: int) -> dict[str, Any]:
    """A compilation under an activation memory budget, and whether the knapsack was solved."""
    import torch._functorch.config as config

    torch._dynamo.reset()
    graphs = Compiled()
    with config.patch(activation_memory_budget=budget), solver_watched() as asked:
        compiled = torch.compile(Loss(heads).__call__, backend=graphs.backend(), fullgraph=True)
        value = compiled(*given.args)
        value.backward()
    if not graphs.flops:
        raise RuntimeError("torch.compile ran the loss as it is: its graphs were never called")
    return row(graphs.saved, given, graphs.flops, value) | {"knapsack": bool(asked)}


@contextlib.contextmanager
def solver_watched() -> Iterator[list[Any]]:
    """What the partitioner asks of its solver: nothing where a cut of the graph is small enough."""
    import torch._functorch.partitioners as partitioners

    asked, name = [], "_optimize_runtime_with_given_memory"
    solver = getattr(partitioners, name)

    def watched(*args: Any) -> Any:
        asked.append(args)
        return solver(*args)

    with mock.patch.object(partitioners, name, watched):
        yield asked


def ways(given: Given, settings: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Nothing re-run, checkpoints, budgets: a row, or a word why there is none."""
    heads = settings["heads"]
    yield "eager", written_out(Loss(heads), given)
    for size in settings["blocks"]:
        yield f"checkpoint {size}", written_out(Loss(heads, checkpointed, size), given)
    for budget in settings["budgets"]:
        try:
            yield f"budget {budget}", within(budget, given, heads)
        except (ImportError, AttributeError) as error:
            yield f"budget {budget}", {"missing": f"{type(error).__name__}: {error}"}


def main() -> None:
    path, settings = sys.argv[1], json.loads(sys.argv[2])
    warnings.simplefilter("ignore")
    given = Given(path)
    for name, result in ways(given, settings):
        print(json.dumps([name, result]), flush=True)
    norm = float(torch.stack([x.double().norm() for x in given.plain]).norm())
    print(json.dumps(["about", {"torch": torch.__version__, "gradient_norm": norm}]))


if __name__ == "__main__":
    main()
