"""Bytes of a step, read from the collectives of its lowered program and compared with jrc's."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from benchmarks.dgc._steps import (
    AXIS,
    SPARSITY,
    abstract_mesh,
    gpt2,
    in_place,
    optimizer,
    over_mesh,
    residual,
    size_of,
)

WIRES = ("f32", "bf16", "fp8", "int8")
PAYLOAD_REPLICAS = 8
REPLICAS = (2, 4, 8, 16, 32, 64)
EXCHANGES: dict[str, dict[str, str]] = {
    "allgather": {"exchange": "allgather"},
    "sharded": {"exchange": "sharded"},
    "dense": {"exchange": "dense"},
    "auto": {"exchange": "auto"},
    # Only the blocked selector lets `auto` choose the sharded exchange.
    "auto, blocked": {"exchange": "auto", "selector": "blocked"},
}
MODELS: dict[str, Callable[[bool], Any]] = {"ResNet-50": residual, "GPT-2 124M": gpt2}
KINDS = ("all_gather", "all_to_all", "all_reduce", "reduce_scatter", "collective_permute")
_OPERATION = re.compile(rf'"stablehlo\.({"|".join(KINDS)})"')
_OPERANDS = re.compile(r"[>)}] : \(([^()]*)\) -> ")
_TENSOR = re.compile(r"tensor<((?:\d+x)*)(?:f|ui|i)(\d+)>")


class Collective(NamedTuple):
    """One collective of a program: its kind and the bytes of its operands."""

    kind: str
    nbytes: int

    @property
    def is_guard(self) -> bool:
        """Whether this is the sum of one number that tells whether all gradients are finite."""
        return self.kind == "all_reduce" and self.nbytes == 4

    def sent(self, replicas: int) -> float:
        """Return the bytes that one replica sends in ring algorithms."""
        if self.kind == "all_gather":
            return (replicas - 1) * self.nbytes
        if self.kind == "all_to_all":
            return (replicas - 1) / replicas * self.nbytes
        if self.kind == "all_reduce":
            return 2 * (replicas - 1) / replicas * self.nbytes
        raise ValueError(f"dgc.costs: a step must have no {self.kind}, got one in the program.")


class Step(NamedTuple):
    """The collectives of a step except the guard's, and the bytes that a replica sends in them."""

    collectives: tuple[Collective, ...]
    sent: float
    dense: float

    def payload(self) -> int:
        """Return the bytes that a replica contributes: its entries, and leaves that stay dense."""
        return sum(each.nbytes for each in self.collectives)


def collectives(text: str) -> list[Collective]:
    """Return the collectives of a StableHLO text, with the bytes of all their operands.

    A sum's operation has a region, so its types stand some lines below its name.
    """
    found = []
    for name in _OPERATION.finditer(text):
        operands = _OPERANDS.search(text, name.end())
        if operands is None:
            raise ValueError(f"dgc.costs: types must follow a {name[1]}, got none in the program.")
        nbytes = 0
        for shape, bits in _TENSOR.findall(operands[1]):
            nbytes += math.prod(int(n) for n in shape.split("x") if n) * int(bits) // 8
        found.append(Collective(name[1], nbytes))
    return found


def step_of(like: Any, replicas: int, **options: Any) -> Step:
    """Return the collectives of one step's program; nothing is allocated, no device is needed.

    Raises:
        RuntimeError: If their bytes are not those that `jrc.dgc_stats` will report of the step.
    """
    tx = optimizer(axis_name=AXIS, **options)
    step, args = over_mesh(in_place(tx), tx, like, abstract_mesh(replicas))
    traced = step.trace(*args)
    predicted, dense = reported(traced)
    found = collectives(traced.lower(lowering_platforms=("cpu",)).as_text())
    sending = tuple(each for each in found if not each.is_guard)
    sent = sum(each.sent(replicas) for each in sending)
    if not math.isclose(sent, predicted, rel_tol=1e-6) or len(sending) == len(found):
        raise RuntimeError(
            f"dgc.costs: {options} on {replicas} replicas: jrc predicts {predicted:,.0f} bytes, "
            f"the program sends {sent:,.0f}, in {found}"
        )
    return Step(sending, sent, dense)


def reported(traced: Any) -> tuple[float, float]:
    """Return the bytes sent and those of a dense exchange, as the state will report them.

    With a single level of sparsity they are constants of the program.
    """
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(traced.out_info)]
    (body,) = (e.params["jaxpr"] for e in traced.jaxpr.eqns if e.primitive.name == "shard_map")
    fields = dict(zip(paths, body.outvars, strict=True))
    sent, dense = (
        next(float(out.val) for path, out in fields.items() if path.endswith(field))
        for field in (".bytes_sent", ".bytes_dense")
    )
    return sent, dense


def payloads(toy: bool, status: Callable[[str], None]) -> dict[str, Any]:
    """Return bytes of every format for both models, with the default `min_size` and all leaves."""
    found = {}
    for name, shapes in MODELS.items():
        like, rows = shapes(toy), []
        size = size_of(like)
        for wire in ("bf16",) if toy else WIRES:
            for settings in ({}, {"min_size": 0}):
                status(f"{name}, {wire}")
                step = step_of(like, PAYLOAD_REPLICAS, wire=wire, exchange="allgather", **settings)
                sums = sum(c.nbytes for c in step.collectives if c.kind == "all_reduce")
                rows.append({
                    "wire": wire, "all_leaves": bool(settings), "payload": step.payload(),
                    "beside": sums, "ratio": 4 * size / step.payload(), "sent": step.sent,
                    "ring_ratio": step.dense / step.sent,
                })  # fmt: skip
        found[name] = {"parameters": size, "leaves": len(jax.tree.leaves(like)), "rows": rows}
    return {"sparsity": SPARSITY, "replicas": PAYLOAD_REPLICAS, "models": found}


def by_replicas(toy: bool, status: Callable[[str], None]) -> dict[str, Any]:
    """Return bytes that a replica of a ResNet-50 sends in each exchange, all leaves compressed."""
    like, rows = residual(toy), {}
    counts, wires = ((2, 4), ("f32",)) if toy else (REPLICAS, ("f32", "bf16"))
    for wire in wires:
        # The other exchanges resolve to one of these two, or send no entries.
        names = EXCHANGES if wire == "f32" else ("allgather", "sharded")
        for name in names:
            row: dict[str, Any] = {"sent": {}, "forms": {}}
            for replicas in counts:
                status(f"{wire}, {name}, {replicas} replicas")
                step = step_of(like, replicas, wire=wire, min_size=0, **EXCHANGES[name])
                row["sent"][str(replicas)] = step.sent
                row["forms"][str(replicas)] = form_of(step)
            rows[f"{name}, {wire}"] = row
    found = {"model": "ResNet-50", "sparsity": SPARSITY, "replicas": list(counts), "rows": rows}
    meets = {wire: crossover(like, wire, rows, counts, status) for wire in wires}
    return found | {"crossover": meets}


def form_of(step: Step) -> str:
    """Return the kind of exchange of a step: sharded, gather or dense."""
    kinds = {each.kind for each in step.collectives}
    return "sharded" if "all_to_all" in kinds else "gather" if "all_gather" in kinds else "dense"


def crossover(
    like: Any, wire: str, rows: dict[str, Any], counts: Sequence[int], status: Callable[[str], None]
) -> dict[str, Any]:
    """Return the number of replicas from which another exchange sends less than a gather.

    A gather sends `(N - 1)` payloads and a dense sum `2 (N - 1) / N` times all bytes. The programs
    just below and above the crossing are checked.
    """
    status(f"{wire}, crossover")
    payload = rows[f"allgather, {wire}"]["sent"][str(counts[0])] / (counts[0] - 1)
    meet = 8 * size_of(like) / payload
    below = math.floor(meet) - (meet == math.floor(meet))
    forms = [form_of(step_of(like, n, wire=wire, min_size=0)) for n in (below, below + 1)]
    if forms != ["gather", "dense"]:
        raise RuntimeError(
            f"dgc.costs: exchange='auto' takes {forms} on {below} and {below + 1} replicas, and a "
            f"sum sends less from {meet:.1f} on"
        )
    sharded, gather = (rows[f"{name}, {wire}"]["sent"] for name in ("sharded", "allgather"))
    fewer = [n for n in counts if sharded[str(n)] < gather[str(n)]]
    return {"dense": below + 1, "sharded": min(fewer, default=None)}
