"""Resident memory of this process. Linux only."""

import ctypes
import pathlib
import re


def resident(field: str) -> int:
    """Return bytes of this process: `VmRSS` now, `VmHWM` the most since `reset_most`."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) * 1024


def reset_most() -> None:
    """Give free memory back to the system and start `VmHWM` from here: compiling needs memory."""
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")
