"""Collectives of a compiled gradient: what devices exchange, along which axes, and how often.

With automatic sharding collectives are no equations of the program: XLA's partitioner inserts them.
They are read from the text of the compiled program, with the names that XLA gives them. A parameter
that is gathered for the forward pass has the parameter's name, one that is gathered again for a
recomputed region that of the region's barrier.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jrc._jaxpr import mesh_of_shard_map, walk
from jrc.remat._compiled.hlo import Computation, Instruction, Module
from jrc.remat._compiled.hlo_opcodes import opcode_facts
from jrc.remat._compiled.replica_groups import Groups, axes_of_groups, groups_of
from jrc.remat._compiled.trip_count import trip_count
from jrc.remat._gradient.loss import Loss
from jrc.remat._region.rerun_scope import is_backward_path, is_rerun_path


@dataclasses.dataclass(frozen=True)
class Collective:
    """Collectives of the compiled program that are of one kind, type and group; on one device.

    Attributes:
        kind: XLA's name for it, such as `all-reduce`.
        count: How many run, one in a loop as often as the loop iterates.
        bytes: Bytes of all their results on one device.
        rerun: How many of them belong to recomputation.
        backward: How many of them run in the backward pass.
        arrays: The types of what one of them returns: `f32[256,1024]`.
        axes: The axes of the mesh that they go along; empty where no mesh is known.
        devices: How many devices exchange with each other; 0 if unknown.
    """

    kind: str
    count: int
    bytes: int
    rerun: int
    backward: int = 0
    arrays: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    devices: int = 0

    @property
    def sent(self) -> int:
        """Bytes that a device sends for all of them, around a ring of its group."""
        return round(self.bytes * _sent_share(self.kind, self.devices))

    @property
    def rerun_sent(self) -> int:
        """Bytes that a device sends for those that belong to recomputation."""
        return self.count and self.sent * self.rerun // self.count


def collectives(module: Module, mesh: Mapping[str, int]) -> tuple[Collective, ...]:
    """Return the collectives of a compiled program, those of automatic sharding included.

    Args:
        module: The program.
        mesh: The axes of its mesh with their sizes, in order; empty where there is none.

    Returns:
        The collectives, those first of which a device sends most.
    """
    found: dict[tuple[Any, ...], Any] = {}
    for each, times in _all_collectives(module):
        groups = groups_of(each.attributes, module.devices)
        kind = each.opcode.removesuffix("-start")
        among = axes_of_groups(groups, mesh), _devices(each, groups)
        if kind == "send":  # its attributes say nothing of the devices
            among = (), 0
        counts = found.setdefault((kind, _result_types(each), *among), [0, 0, 0, 0])
        counts[0] += times
        counts[1] += times * _result_bytes(each)
        counts[2] += times * is_rerun_path(each.path)
        counts[3] += times * is_backward_path(each.path)
    rows = (Collective(kind, *counts, *where) for (kind, *where), counts in found.items())
    return tuple(sorted(rows, key=lambda each: (-each.sent, -each.bytes, each.kind)))


def mesh_of(loss: Loss) -> Mapping[str, int]:
    """Return the mesh of a program's arguments, or of a `shard_map` in it; empty without one."""
    for leaf in (*loss.perturbed, *loss.rest):
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if mesh is not None and mesh.size > 1:
            return mesh.shape
    found = (mesh_of_shard_map(eqn) for eqn, _ in walk(loss.program.jaxpr))
    return next((mesh.shape for mesh in found if mesh is not None), {})


def _all_collectives(module: Module) -> Iterator[tuple[Instruction, int]]:
    """Yield every collective that runs, with how often it does."""

    def visit(computation: Computation, times: int) -> Iterator[tuple[Instruction, int]]:
        parts: set[str] = set()
        for each in computation.instructions:
            facts = opcode_facts(each.opcode)
            if facts.is_collective:
                yield each, times
            elif facts.runs_computations:
                often = times * trip_count(module, computation, each)
                for inner in module.called(each):
                    yield from visit(inner, often)
            elif facts.is_merged:
                # Several fusions may hold one collective: where it starts, what runs beside it,
                # and where it ends. They share its channel.
                for inner in _fused(module, each):
                    channel = _channel(inner)
                    if not channel or channel not in parts:
                        yield inner, times
                    parts.add(channel)

    return visit(module.entry, 1)


def _fused(module: Module, fusion: Instruction) -> Iterator[Instruction]:
    """Yield the collectives in a fusion; one that is sliced at once has the slice's type."""
    for computation in module.called(fusion):
        for each in computation.instructions:
            facts = opcode_facts(each.opcode)
            if facts.is_collective:
                yield each
            elif facts.is_merged:
                yield from _fused(module, each)


def _channel(each: Instruction) -> str:
    found = re.search(r"channel_id=(\d+)", each.attributes)
    return found[1] if found else ""


def _devices(each: Instruction, groups: Groups) -> int:
    """Return how many devices exchange with each other; of a permutation all that take part."""
    if "source_target_pairs=" in each.attributes:
        return len({i for pair in groups for i in pair})
    return len(groups[0])


def _result_types(each: Instruction) -> tuple[str, ...]:
    """Return the types of a result."""
    start = _position(each)
    if start is None:
        return each.types
    before = sum(map(_count, each.shape[:start]))
    return each.types[before : before + _count(each.shape[start])]


def _result_bytes(each: Instruction) -> int:
    """Return the bytes of a result."""
    start = _position(each)
    return _sum(each.shape if start is None else each.shape[start])


def _position(each: Instruction) -> int | None:
    """Return which part of a tuple is the result: what starts a collective has its operand first.

    A `send` returns its operand and what tells that it is done.
    """
    if not isinstance(each.shape, tuple) or len(each.shape) < 2:
        return None
    return 0 if each.opcode == "send" else 1 if each.opcode.endswith("-start") else None


def _sum(shape: Any) -> int:
    """Return the bytes of all arrays of a shape."""
    return sum(map(_sum, shape)) if isinstance(shape, tuple) else shape


def _count(shape: Any) -> int:
    """Return the number of arrays of a shape."""
    return sum(map(_count, shape)) if isinstance(shape, tuple) else 1


def _sent_share(kind: str, devices: int) -> float:
    """Return the bytes that a device sends around a ring, for each byte of its result.

    Of `n` devices each sends `(n - 1) / n` of what all gather, twice that of what they reduce for
    all, and `n - 1` times the part of a reduced result that it is left with.
    """
    if not devices:
        return 1.0
    others = devices - 1
    shares = {"all-reduce": 2 * others / devices, "reduce-scatter": others}
    shares["collective-permute"] = shares["collective-broadcast"] = 1
    return shares.get(kind, others / devices)
