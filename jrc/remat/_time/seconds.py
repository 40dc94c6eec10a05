"""Seconds of a compiled program, and where they come from."""

import dataclasses
from typing import Literal

from jrc._targets import Chip
from jrc.remat._compiled.hlo import Module
from jrc.remat._time.cycles import cycles
from jrc.remat._time.exchange import exchange_seconds
from jrc.remat._time.roofline import roofline_seconds

Source = Literal["stated by the compiler", "modelled", "measured"]


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Seconds of one run of a program on one device.

    Attributes:
        value: The seconds.
        source: Where they come from. What is stated or modelled serves to compare programs on one
            device; what a device takes differs.
    """

    value: float
    source: Source


def seconds_on(module: Module, chip: Chip) -> Seconds | None:
    """Return the seconds of a program on a chip; `None` if nothing is known of the chip's rates.

    On a TPU they are the cycles that its compiler states for each kernel, on a GPU a roofline over
    the kernels. What devices send to each other, and what goes to the host's memory, is added as
    if nothing ran beside it.

    Args:
        module: The compiled program.
        chip: What it is compiled for.
    """
    beside = exchange_seconds(module, chip)
    if chip.platform == "tpu":
        if chip.clock.value is None:
            return None
        return Seconds(cycles(module) / chip.clock.value + beside, "stated by the compiler")
    return Seconds(roofline_seconds(module, chip) + beside, "modelled")
