"""The methods of `benchmarks.network.training`, and the model that they train."""

import dataclasses
from collections.abc import Iterable, Mapping

import jrc
from benchmarks._private import overlap_of
from jrc.outer_optimizers import OuterOptimizer

MODEL = {"vocabulary": 256, "layers": 8, "heads": 8, "width": 512, "length": 128, "batch": 2}
TOY_MODEL = {"vocabulary": 256, "layers": 1, "heads": 2, "width": 32, "length": 16, "batch": 1}
RATE, MOMENTUM, CLIP, DECAY, SPARSITY = 3e-4, 0.9, 1.0, 0.1, 0.999


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to train.

    Attributes:
        title: For a table.
        baseline: The method that has the same computation and no exchange.
        outer: The outer optimizer.
        sgd: Whether the optimizer is momentum SGD and not AdamW.
        torch: Whether PyTorch trains.
    """

    title: str
    baseline: str = "alone"
    outer: OuterOptimizer | None = None
    sgd: bool = False
    torch: bool = False

    @property
    def every(self) -> int:
        """Steps of a round."""
        return 1 if self.outer is None else int(self.outer.sync_every)

    @property
    def overlap(self) -> int:
        """Steps by which a round's result arrives late."""
        return 0 if self.outer is None else overlap_of(self.outer)


METHODS: Mapping[str, Method] = {
    "alone": Method("jrc: AdamW, no exchange"),
    "adamw": Method("jrc: AdamW, dense"),
    "diloco": Method("jrc: DiLoCo, every 15", outer=jrc.DiLoCo(15)),
    "diloco_4bit": Method("jrc: DiLoCo, 4 bits, every 15", outer=jrc.DiLoCo(15, wire="4bit")),
    "sparseloco_15": Method("jrc: SparseLoCo, every 15", outer=jrc.SparseLoCo(15)),
    "sparseloco_30": Method("jrc: SparseLoCo, every 30", outer=jrc.SparseLoCo(30)),
    "sparseloco_15_overlap": Method(
        "jrc: SparseLoCo, every 15, overlap=1", outer=jrc.SparseLoCo(15, overlap=1)
    ),
    "alone_sgd": Method("jrc: momentum SGD, no exchange", "alone_sgd", sgd=True),
    "dgc": Method("jrc: DGC 99.9 %, momentum SGD", "alone_sgd", sgd=True),
    "alone_torch": Method("PyTorch: AdamW, no exchange", "alone_torch", torch=True),
    "ddp": Method("PyTorch: DDP, AdamW", "alone_torch", torch=True),
    "powersgd": Method("PyTorch: DDP, PowerSGD, AdamW", "alone_torch", torch=True),
}
"""All methods; the baselines are those whose name begins with `alone`."""


def with_baselines(names: Iterable[str]) -> list[str]:
    """Return methods and their baselines, in the order of `METHODS`."""
    asked = {each for name in names for each in (name, METHODS[name].baseline)}
    return [name for name in METHODS if name in asked]


def exchanges(name: str) -> bool:
    """Return whether a method exchanges anything."""
    return METHODS[name].baseline != name
