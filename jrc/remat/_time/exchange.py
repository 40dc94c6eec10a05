"""Seconds that a program exchanges data with other devices, and with the host's memory."""

import re

from jrc._targets import Chip
from jrc.remat._compiled.collectives import collectives
from jrc.remat._compiled.hlo import Computation, Instruction, Module
from jrc.remat._time.executed import sum_over_executed

# The memory of the host, in the layouts of both platforms.
_ON_HOST = re.compile(r"S\(5\)")


def exchange_seconds(module: Module, chip: Chip) -> float:
    """Return the seconds of all collectives and copies to the host, as if nothing ran beside them.

    Args:
        module: The program.
        chip: The chip, of whose rates those that are not known count as infinite.
    """
    link, host = chip.link_bandwidth.value, chip.copy_bandwidth.value
    sent = sum(each.sent for each in collectives(module, {}))

    def copied(_: Computation, each: Instruction) -> float:
        if each.opcode not in ("copy-start", "copy") or not _moves_to_host(each):
            return 0.0
        return float(each.array_bytes[0])

    seconds = sent / link if link else 0.0
    return seconds + (sum_over_executed(module, copied) / host if host else 0.0)


def _moves_to_host(each: Instruction) -> bool:
    """Whether one side of a copy is in the host's memory."""
    return bool(_ON_HOST.search(each.attributes) or _ON_HOST.search(each.result))
