"""PyTorch's side of `benchmarks.pytorch.saved_bytes`, in a process of its own without JAX.

Settings: `twin`, a name of `_twins`; `options`, its keyword arguments; `arguments`, a file with the
parameters and the other inputs (`params/blocks/0/q`, `inputs/0`); `budgets`; `saved`, bytes for
which a budget is chosen; `sizes`, the numbers of blocks that a checkpoint spans. There is an answer
for each way: saved bytes, product FLOPs, the loss, and the difference of its gradients from those
with nothing recomputed; the last answer, `about`, is about all of them.

Everything is executed. Saved bytes are of the storages that forward passes to backward, each once,
without those of parameters and inputs. FLOPs are those of `FlopCounterMode`, which counts matrix
products and convolutions alone. A budget goes through `torch.compile`, with Inductor's
decompositions and its partitioner, all options of both at their defaults (solver: `dp`); the result
is interpreted, not compiled to C++. Inductor's pattern for fused attention is left out, because it
would hide products from the counter.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from benchmarks._lib import child
from benchmarks.pytorch._twins.blocks import Blocks
from benchmarks.pytorch._twins.catalogue import TWINS

Tensor = torch.Tensor
Loss = Callable[[Any, Any], Tensor]
_NOISE = 1e-5


class Arguments:
    """Parameters and inputs, and the gradients that every way must have."""

    def __init__(self, path: str, device: str = "cpu") -> None:
        tree: dict[str, Any] = {}
        self.leaves: list[Tensor] = []
        others = []
        with np.load(path) as arrays:
            for name in arrays.files:
                *path_to, last = name.split("/")
                leaf = torch.from_numpy(arrays[name]).to(device)
                if path_to[0] == "params":
                    self.leaves.append(leaf.requires_grad_())
                else:
                    leaf = leaf.long() if leaf.dtype is torch.int32 else leaf
                    others.append(leaf)
                inner = tree
                for each in path_to:
                    inner = inner.setdefault(each, {})
                inner[last] = leaf
        self.args = _with_lists(tree["params"]), _with_lists(tree["inputs"])
        self.own = set(storages([*self.leaves, *others]))
        self.plain: list[Tensor] = []

    def gradients_differ(self) -> float:
        """Return the largest difference to the first gradients, relative to a leaf's largest.

        A leaf that is rounding noise (the bias of a key) is compared with the largest of all.
        """
        found = [leaf.grad for leaf in self.leaves]
        for leaf in self.leaves:
            leaf.grad = None
        self.plain = self.plain or found
        sizes = [float(x.abs().max()) for x in self.plain]
        most = max(sizes)
        return max(
            float((x - y).abs().max()) / (size if size > _NOISE * most else most)
            for x, y, size in zip(self.plain, found, sizes, strict=True)
        )


def _with_lists(tree: Any) -> Any:
    """Return a tree in which what has numbers as names is a list."""
    if not isinstance(tree, dict):
        return tree
    found = {name: _with_lists(inner) for name, inner in tree.items()}
    return list(found.values()) if all(map(str.isdecimal, found)) else found


def storages(tensors: Any) -> dict[int, int]:
    """Return the bytes of each storage by its address, valid while the tensors live."""
    found = [x.untyped_storage() for x in tensors if isinstance(x, Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def eager(loss: Loss, given: Arguments) -> dict[str, Any]:
    """Return the figures of a way without a compiler: what autograd itself saves."""
    kept: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x.detach())
        return x

    with FlopCounterMode(display=False) as counter:
        with saved_tensors_hooks(pack, lambda x: x):
            value = loss(*given.args)
        saved = storages(kept)
        kept.clear()
        value.backward()
    return row(saved, given, counter.get_total_flops(), value)


def row(saved: dict[int, int], given: Arguments, flops: int, value: Tensor) -> dict[str, Any]:
    return {
        "saved": sum(size for address, size in saved.items() if address not in given.own),
        "product_flops": flops,
        "loss": value.item(),
        "gradients_differ": given.gradients_differ(),
    }


class Compiled:
    """The graphs of one compilation as they run: what forward saves, and products."""

    def __init__(self) -> None:
        self.saved: dict[int, int] = {}
        self.flops = 0

    def backend(self) -> Callable[..., Any]:
        # The decomposition of pooling reads it without importing it.
        import torch._inductor.lowering  # noqa: F401
        from functorch.compile import min_cut_rematerialization_partition
        from torch._dynamo.backends.common import aot_autograd
        from torch._inductor.decomposition import select_decomp_table

        return aot_autograd(
            fw_compiler=functools.partial(self.graph, self.after_forward),
            bw_compiler=functools.partial(self.graph, lambda outs: None),
            decompositions=select_decomp_table(),
            partition_fn=functools.partial(
                min_cut_rematerialization_partition, compiler="inductor"
            ),
        )

    def graph(self, look: Callable[[Any], None], module: Any, _: Any) -> Callable[..., Any]:
        from functorch.compile import make_boxed_func

        # Calling the module would add hooks by which the counter distinguishes modules.
        run = torch.fx.Interpreter(module).run

        def counted(*args: Any) -> Any:
            with FlopCounterMode(display=False) as counter:
                outs = run(*args)
            self.flops += counter.get_total_flops()
            look(outs)
            return outs

        return make_boxed_func(counted)

    def after_forward(self, outs: Sequence[Any]) -> None:
        """Note what forward saves: all its results but the first, the loss."""
        self.saved = storages(outs[1:])


def within(budget: float, given: Arguments, loss: Loss) -> dict[str, Any]:
    """Return the figures under an activation memory budget, and whether the knapsack was solved."""
    import torch._functorch.config as config

    torch._dynamo.reset()
    graphs = Compiled()
    with config.patch(activation_memory_budget=budget), solver_watched() as asked:
        compiled = torch.compile(loss, backend=graphs.backend(), fullgraph=True)
        value = compiled(*given.args)
        value.backward()
    if not graphs.flops:
        raise RuntimeError(
            "torch.compile must call the compiled graphs, got a plain run of the loss."
        )
    return row(graphs.saved, given, graphs.flops, value) | {"knapsack": bool(asked)}


@contextlib.contextmanager
def solver_watched() -> Iterator[list[Any]]:
    """Record the calls of the partitioner's solver: none where a cut of the graph fits."""
    import torch._functorch.partitioners as partitioners

    asked, name = [], "_optimize_runtime_with_given_memory"
    solver = getattr(partitioners, name)

    def watched(*args: Any) -> Any:
        asked.append(args)
        return solver(*args)

    with mock.patch.object(partitioners, name, watched):
        yield asked


def ways(given: Arguments, settings: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the baseline, checkpoints and budgets: their figures, or why there are none."""

    def loss(run: Blocks) -> Loss:
        twin = TWINS[settings["twin"]]
        return lambda params, inputs: twin(run, params, inputs, **settings["options"])

    yield "eager", eager(loss(Blocks()), given)
    for size in settings["sizes"]:
        yield f"checkpoint {size}", eager(loss(Blocks(True, size)), given)
    most = 0
    for budget in settings["budgets"]:
        try:
            found = within(budget, given, loss(Blocks()))
        except (ImportError, AttributeError) as error:
            found = {"missing": f"{type(error).__name__}: {error}"}
        most = max(most, found.get("saved", 0))
        yield f"budget {budget}", found
    for saved in settings["saved"] if most else ():
        budget = min(round(saved / most, 3), 1.0)
        if budget not in settings["budgets"]:
            yield f"budget {budget}", within(budget, given, loss(Blocks()))


def main() -> None:
    settings = child.settings()
    warnings.simplefilter("ignore")
    given = Arguments(settings["arguments"])
    for name, result in ways(given, settings):
        child.answer([name, result])
    norm = float(torch.stack([x.double().norm() for x in given.plain]).norm())
    child.answer(["about", {"torch": torch.__version__, "gradient_norm": norm}])


if __name__ == "__main__":
    main()
