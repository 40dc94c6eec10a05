"""The methods of `benchmarks.convergence.outer`, and how a report names their runs."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jrc
from jrc.outer_optimizers import OuterOptimizer

REPLICAS = 4
"""The number of replicas of runs whose name has none."""


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to train several replicas.

    Attributes:
        title: For a table.
        outer: The outer optimizer; `None` exchanges in every step.
        dgc: Whether the optimizer is DGC and not AdamW.
        ef21: Whether AdamW has the gradient that EF21 estimates.
        replicas: The only number of replicas that it is for; `None` if any.
    """

    title: str
    outer: OuterOptimizer | None = None
    dgc: bool = False
    ef21: bool = False
    replicas: int | None = None


def _sparse(every: int, **options: Any) -> Method:
    return Method(_title("SparseLoCo", every, options), jrc.SparseLoCo(every, **options))


def _diloco(every: int, **options: Any) -> Method:
    return Method(_title("DiLoCo", every, options), jrc.DiLoCo(every, **options))


def _title(name: str, every: int, options: Mapping[str, Any]) -> str:
    text = "".join(f", {key}={value}" for key, value in options.items())
    return f"{name}, every {every}{text}"


METHODS: Mapping[str, Method] = {
    "adamw": Method("AdamW, dense"),
    "sparseloco_1": _sparse(1),
    "sparseloco_5": _sparse(5),
    "sparseloco_15": _sparse(15),
    "sparseloco_30": _sparse(30),
    "sparseloco_5_d32": _sparse(5, density=1 / 32),
    "sparseloco_15_d16": _sparse(15, density=1 / 16),
    "sparseloco_15_all": _sparse(15, mean="all"),
    "sparseloco_15_chunk": _sparse(15, levels="chunk"),
    "sparseloco_15_f32": _sparse(15, wire="f32"),
    "sparseloco_15_f3": _sparse(15, fragments=3),
    "sparseloco_15_overlap": _sparse(15, overlap=1),
    "diloco_15": _diloco(15),
    "diloco_15_4bit": _diloco(15, wire="4bit"),
    "diloco_30": _diloco(30),
    "diloco_30_4bit": _diloco(30, wire="4bit"),
    "diloco_30_f3": _diloco(30, fragments=3),
    "diloco_30_overlap": _diloco(30, overlap=1),
    "diloco_30_overlap_b5": _diloco(30, overlap=1, blend=0.5),
    "diloco_30_4bit_f3_overlap": _diloco(30, wire="4bit", fragments=3, overlap=1),
    "diloco_30_4bit_f3_overlap_b5": _diloco(30, wire="4bit", fragments=3, overlap=1, blend=0.5),
    "snoo_15": Method("SNOO: one replica, every 15", jrc.DiLoCo(15), replicas=1),
    "average_30": Method("plain averaging, every 30", jrc.DiLoCo(30, 1.0, 0.0)),
    "ef21": Method("EF21 99 %, AdamW", ef21=True),
    "dgc": Method("DGC 99.9 %, momentum SGD", dgc=True),
}


def run_name(method: str, replicas: int) -> str:
    """Return the name in a report of a method's runs on so many replicas."""
    return method if replicas == REPLICAS else f"{method}, {replicas} replicas"


def by_replicas(runs: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the runs of each number of replicas, by method, in the order of `METHODS`."""
    counts = {REPLICAS}
    for name in runs:
        _, _, rest = name.partition(", ")
        counts |= {int(rest.split()[0])} if rest else set()
    found = {
        count: {m: seeds for m in METHODS if (seeds := runs.get(run_name(m, count)))}
        for count in sorted(counts)
    }
    return {count: methods for count, methods in found.items() if methods}
