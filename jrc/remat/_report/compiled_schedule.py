"""Live bytes and collectives of a compiled gradient, read from its scheduled HLO text."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jrc.remat._gradient.loss import Loss
from jrc.remat._region.rerun_scope import is_rerun_path
from jrc.remat._report.buffer_liveness import live_bytes
from jrc.remat._report.hlo import Computation, Instruction, Module
from jrc.remat._report.hlo_opcodes import opcode_facts


@dataclasses.dataclass(frozen=True)
class LivePoint:
    """One instruction of the compiled program.

    Attributes:
        bytes: Temporaries that are live while it runs, and results made so far.
        phase: `"forward"` or `"backward"`.
        mark: The name of the marked value that it makes, if there is one.
    """

    bytes: int
    phase: str
    mark: str | None = None


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of collective of the compiled program.

    Attributes:
        kind: XLA's name for it, such as `all-reduce`.
        count: How many run, one in a loop as often as the loop iterates.
        bytes: Bytes of all their results on one device.
        rerun: How many of them belong to recomputation.
    """

    kind: str
    count: int
    bytes: int
    rerun: int


def live_points(module: Module, loss: Loss) -> tuple[LivePoint, ...]:
    """Return the live bytes along the schedule, with each mark where its value is made."""
    points, phase = [], "forward"
    made: dict[str, int] = {}
    pairs = zip(module.entry.instructions, live_bytes(module), strict=True)
    for each, level in pairs:
        if not opcode_facts(each.opcode).allocates:
            continue
        if each.path:
            phase = "backward" if _is_backward(each.path) else "forward"
        for mark, is_late in _marks_made(module, each, loss):
            made[mark] = len(points) if is_late else made.get(mark, len(points))
        points.append(LivePoint(level, phase))
    for mark, at in made.items():
        points[at] = dataclasses.replace(points[at], mark=mark)
    return tuple(points)


def _marks_made(module: Module, each: Instruction, loss: Loss) -> Iterator[tuple[str, bool]]:
    """Yield the marks of the values that an instruction makes, as `Loss.marks_in` does."""
    if _is_backward(each.path):
        # XLA also copies a cheap instruction into the fusion that reads its result.
        return
    for path in module.paths(each):
        for mark, is_late in () if _is_backward(path) else loss.marks_in(path):
            # A value that a region shares with others (a mask) is fused into those too.
            if not is_late or path == each.path:
                yield mark, is_late


def collectives(module: Module) -> tuple[Collective, ...]:
    """Return the collectives of a compiled program, those of automatic sharding included."""
    found: dict[str, list[int]] = {}
    for each, times in _all_instructions(module):
        if opcode_facts(each.opcode).is_collective:
            counts = found.setdefault(each.opcode.removesuffix("-start"), [0, 0, 0])
            counts[0] += times
            counts[1] += times * _result_bytes(each)
            counts[2] += times * is_rerun_path(each.path)
    kinds = (Collective(kind, *counts) for kind, counts in found.items())
    return tuple(sorted(kinds, key=lambda each: -each.bytes))


def _is_backward(path: str) -> bool:
    return "transpose(" in path


def _all_instructions(module: Module) -> Iterator[tuple[Instruction, int]]:
    """Yield every instruction that runs, with how often it does."""

    def visit(computation: Computation, times: int) -> Iterator[tuple[Instruction, int]]:
        for each in computation.instructions:
            yield each, times
            if opcode_facts(each.opcode).runs_computations:
                for inner in module.called(each):
                    yield from visit(inner, times * each.trips)

    return visit(module.entry, 1)


def _result_bytes(each: Instruction) -> int:
    """Return the bytes of a result; what starts a collective also returns its operand."""
    shape = each.shape
    if each.opcode.endswith("-start") and isinstance(shape, tuple) and len(shape) > 1:
        shape = shape[1]
    return _sum(shape)


def _sum(shape: Any) -> int:
    """Return the bytes of all arrays of a shape."""
    return sum(map(_sum, shape)) if isinstance(shape, tuple) else shape
