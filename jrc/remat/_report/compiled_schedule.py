"""What a compiled gradient says of itself: live bytes as it runs, and its collectives."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jrc.remat._gradient.loss import Loss
from jrc.remat._region.rerun_scope import is_rerun_path
from jrc.remat._report.buffer_liveness import live_bytes
from jrc.remat._report.hlo import Instruction, Module

_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# What moves no bytes is no point of the curve.
_SILENT = frozenset("parameter constant tuple get-tuple-element bitcast after-all".split())


@dataclasses.dataclass(frozen=True)
class LivePoint:
    """One instruction of the compiled program.

    Attributes:
        bytes: Temporaries that live while it runs, and results made so far.
        phase: `"forward"` or `"backward"`.
        mark: The marked value that is made here, if there is one.
    """

    bytes: int
    phase: str
    mark: str | None = None


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of collective of the compiled program.

    Attributes:
        kind: XLA's name for it, such as `all-reduce`.
        count: How often it runs, loops times their length.
        bytes: Bytes of its results on one device, of all of them together.
        rerun: How many of them run because a region is re-run.
    """

    kind: str
    count: int
    bytes: int
    rerun: int


def live_points(module: Module, loss: Loss) -> tuple[LivePoint, ...]:
    """The live bytes along the schedule, with the marks where their values are made."""
    points, phase = [], "forward"
    made: dict[str, int] = {}
    pairs = zip(module.entry.instructions, live_bytes(module), strict=True)
    for each, level in pairs:
        if each.opcode in _SILENT:
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
    if _is_backward(each.path):
        # A cheap operator may be fused once more into what reads its result.
        return
    for path in module.paths(each):
        for mark, is_late in () if _is_backward(path) else loss.marks_in(path):
            # What a region shares with others (a mask) is fused into these as well.
            if not is_late or path == each.path:
                yield mark, is_late


def collectives(module: Module) -> tuple[Collective, ...]:
    """The collectives of a compiled program, those that automatic sharding put in too."""
    found: dict[str, list[int]] = {}
    for each, times in _all_instructions(module):
        kind = each.opcode.removesuffix("-start")
        if kind in _COLLECTIVES:
            counts = found.setdefault(kind, [0, 0, 0])
            counts[0] += times
            counts[1] += times * _result_bytes(each)
            counts[2] += times * is_rerun_path(each.path)
    kinds = (Collective(kind, *counts) for kind, counts in found.items())
    return tuple(sorted(kinds, key=lambda each: -each.bytes))


def _is_backward(path: str) -> bool:
    return "transpose(" in path


def _all_instructions(module: Module) -> Iterator[tuple[Instruction, int]]:
    """Every instruction that runs, with how often it does."""

    def inner_function(computation: Any, times: int) -> Iterator[tuple[Instruction, int]]:
        for each in computation.instructions:
            yield each, times
            if each.opcode in ("while", "conditional", "call", "async-start"):
                for inner in module.call_checked(each):
                    yield from inner_function(inner, times * each.trips)

    return inner_function(module.entry, 1)


def _result_bytes(each: Instruction) -> int:
    """Bytes of the result; what starts a collective returns its operand beside it."""
    shape = each.shape
    if each.opcode.endswith("-start") and isinstance(shape, tuple) and len(shape) > 1:
        shape = shape[1]
    return _sum(shape)


def _sum(shape: Any) -> int:
    return sum(map(_sum, shape)) if isinstance(shape, tuple) else shape
