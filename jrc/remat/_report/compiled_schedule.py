"""Live bytes of a compiled gradient, read from its scheduled HLO text."""

import dataclasses
from collections.abc import Iterator, Mapping

from jrc.remat._compiled.hlo import Instruction, Module
from jrc.remat._compiled.hlo_opcodes import opcode_facts
from jrc.remat._gradient.loss import Loss
from jrc.remat._region.rerun_scope import is_backward_path
from jrc.remat._report.buffer_liveness import live_bytes


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


def live_points(
    module: Module, loss: Loss | None = None, donated: Mapping[int, int] | None = None
) -> tuple[LivePoint, ...]:
    """Return the live bytes along the schedule, with each mark where its value is made.

    Args:
        module: The compiled program.
        loss: What it is the gradient of, which knows the marks; `None` for another program.
        donated: As for `live_bytes`.
    """
    points, phase = [], "forward"
    made: dict[str, int] = {}
    pairs = zip(module.entry.instructions, live_bytes(module, donated), strict=True)
    for each, level in pairs:
        if not opcode_facts(each.opcode).allocates:
            continue
        if each.path:
            phase = "backward" if is_backward_path(each.path) else "forward"
        for mark, is_late in _marks_made(module, each, loss) if loss else ():
            made[mark] = len(points) if is_late else made.get(mark, len(points))
        points.append(LivePoint(level, phase))
    for mark, at in made.items():
        points[at] = dataclasses.replace(points[at], mark=mark)
    return tuple(points)


def _marks_made(module: Module, each: Instruction, loss: Loss) -> Iterator[tuple[str, bool]]:
    """Yield the marks of the values that an instruction makes, as `Loss.marks_in` does."""
    if is_backward_path(each.path):
        # XLA also copies a cheap instruction into the fusion that reads its result.
        return
    for path in module.paths(each):
        for mark, is_late in () if is_backward_path(path) else loss.marks_in(path):
            # A value that a region shares with others (a mask) is fused into those too.
            if not is_late or path == each.path:
                yield mark, is_late
