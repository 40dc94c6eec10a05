"""The child's side of a part: the device and the versions first, then a row after the other."""

import dataclasses
import datetime
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jaxlib

import jrc
from benchmarks._lib import child, platform
from benchmarks._private import chip_of_device

Row = dict[str, Any]
NO_STATS = "memory_stats() is None"


@dataclasses.dataclass(frozen=True)
class Settings:
    """How rows are measured.

    Attributes:
        toy: Whether they are tiny.
        plans: The folder of plans that are made already.
        kernels: The folder for the text of each program and the seconds of its kernels.
    """

    toy: bool = False
    plans: str | None = None
    kernels: str | None = None


def serve(measure: Callable[[str, Settings], Iterator[Row]]) -> None:
    """Answer what a part asks for: `about` once, and each row as `measure` yields its figures.

    Args:
        measure: Called with a row's name and the settings; what it yields is merged into the row.
            An error ends the row, and not the process. Behind the last stands `done`.
    """
    asked = child.settings()
    rows, use = asked.pop("rows"), asked.pop("platform")
    settings = Settings(**asked)
    platform.use(use)
    child.answer({"about": about()})
    for name in rows:
        try:
            for found in measure(name, settings):
                child.answer({"row": name, "found": found})
        except Exception as error:  # noqa: BLE001
            child.answer({"row": name, "found": {"error": text_of(error)}})
        child.answer({"row": name, "done": True})
        # Modules keep what was compiled for them.
        jax.clear_caches()


def text_of(error: Exception) -> str:
    """Return the start of an error as one line of a report."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def about() -> Row:
    """Return the device, its memory, the versions and the date."""
    device = jax.local_devices()[0]
    chip, stats = chip_of_device(device), device.memory_stats() or {}
    return platform.machine() | {
        "platform": device.platform,
        "target": chip and chip.name,
        "memory": stats.get("bytes_limit"),
        "jaxlib": jaxlib.__version__,
        "jrc": jrc.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a device had too little memory for a program."""
    return "RESOURCE_EXHAUSTED" in str(error)
