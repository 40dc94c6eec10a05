"""What a compiled candidate costs: its memory, its seconds, and what a device sends to others."""

import dataclasses
from typing import Any

from jrc.remat._compiled.collectives import collectives
from jrc.remat._compiled.hlo import parse_hlo
from jrc.remat._gradient.compiled_memory import Memory, compiled_with_memory
from jrc.remat._time.seconds import Device, Seconds, seconds_on


@dataclasses.dataclass(frozen=True)
class CompiledCost(Memory):
    """Bytes on one device of a compiled program.

    Attributes:
        sent: Bytes that the device sends to others; `None` where they were not counted.
        rerun_sent: How many of them in recomputation.
        time: Seconds of one run; `None` where nothing is known of the device's rates.
    """

    sent: int | None = None
    rerun_sent: int | None = None
    time: Seconds | None = None


def compiled_cost(
    lowered: Any,
    platform: str | None,
    arguments: int = 0,
    counts_sent: bool = False,
    device: Device | None = None,
) -> CompiledCost:
    """Compile a lowered program and return what it costs; the program is not meant to be run.

    Args:
        lowered: The program.
        platform: What it is lowered for.
        arguments: Bytes of its arguments on one device, where the compiler may refuse it.
        counts_sent: Whether its text is read for what a device sends to others.
        device: The device that it is compiled for, if seconds are to be stated.

    Raises:
        RuntimeError: As `memory_needed`.
    """
    found, compiled = compiled_with_memory(lowered, platform, arguments)
    memory = dataclasses.asdict(found)
    if compiled is None or not (counts_sent or device):
        return CompiledCost(**memory)
    module = parse_hlo(compiled.as_text())
    sent = collectives(module, {}) if counts_sent else ()
    return CompiledCost(
        **memory,
        sent=sum(each.sent for each in sent) if counts_sent else None,
        rerun_sent=sum(each.rerun_sent for each in sent) if counts_sent else None,
        time=seconds_on(module, device, found.temporaries) if device else None,
    )
