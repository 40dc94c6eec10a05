"""Seconds of a compiled program, and where they come from."""

import dataclasses
from typing import Any

from jrc._targets import Chip, Target, chip_of_device
from jrc.remat._compiled.hlo import Computation, Instruction, Module
from jrc.remat._time.cycles import cycles
from jrc.remat._time.exchange import exchange_seconds
from jrc.remat._time.host_rates import host_rates
from jrc.remat._time.kernel import kernel_of
from jrc.remat._time.rates import Rates, rates_of_chip
from jrc.remat._time.roofline import kernel_seconds, roofline_seconds


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Seconds of one run of a program on one device.

    Attributes:
        value: The seconds.
        source: Where they come from: "stated by the compiler", "modelled" or "measured". What is
            stated or modelled serves to compare programs on one device; what a device takes
            differs.
    """

    value: float
    source: str


@dataclasses.dataclass(frozen=True)
class Device:
    """A device whose rates are known.

    Attributes:
        rates: Its rates: published ones of a chip, measured ones of this machine's CPU.
        chip: The chip; `None` is this machine's CPU.
    """

    rates: Rates
    chip: Chip | None = None


def known_device(platform: str, chip: Chip | None) -> Device | None:
    """Return the device that programs are compiled for; `None` if nothing is known of its rates.

    Args:
        platform: The platform.
        chip: The accelerator, if it is a known one.
    """
    if chip is None:
        return Device(host_rates()) if platform == "cpu" else None
    rates = rates_of_chip(chip)
    return None if rates is None else Device(rates, chip)


def device_with_rates(there: Target | None, device: Any) -> Device | None:
    """Return what is known of a target, or of a device of JAX where there is none."""
    return known_device(device.platform, there.chip if there else chip_of_device(device))


def seconds_on(module: Module, device: Device, temporaries: int = 0) -> Seconds:
    """Return the seconds of a program on a device.

    On a TPU they are the cycles that its compiler states for each kernel, elsewhere a roofline over
    the kernels; on a CPU with the time in which the system hands temporaries over. What devices
    send to each other, and what goes to the host's memory, is added as if nothing ran beside it.

    Args:
        module: The compiled program.
        device: What it is compiled for.
        temporaries: Bytes of memory that is new in each run.
    """
    chip = device.chip
    beside = exchange_seconds(module, chip) if chip else temporaries / device.rates.new_memory
    if chip and chip.clock.value:
        clock = chip.clock.value

        def by_roofline(around: Computation, each: Instruction) -> float:
            kernel = kernel_of(module, around, each)
            return clock * kernel_seconds(kernel, device.rates) if kernel else 0.0

        stated = cycles(module, by_roofline) / clock
        return Seconds(stated + beside, "stated by the compiler")
    return Seconds(roofline_seconds(module, device.rates) + beside, "modelled")
