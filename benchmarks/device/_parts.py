"""The parts of `benchmarks.device.all`, and how one is run: in child processes, within its time."""

import contextlib
import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks._lib import child
from benchmarks._lib.report import Report
from benchmarks.device import (
    _measured,
    _offload,
    _programs,
    _selection,
    _sizes,
    _speed,
    _torch,
)


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the run.

    Attributes:
        module: Its module below `benchmarks`, run as a child process.
        names: Its rows, the most valuable first.
        toy_names: Its rows with `--toy`.
        share: Its share of the time, over those of all parts.
        is_fresh: Whether each row is a process of its own.
        at_once: Processes at the same time, of a part with `is_fresh`.
        env: Environment variables of the process; `XLA_FLAGS` are added to those that are set.
    """

    module: str
    names: tuple[str, ...]
    toy_names: tuple[str, ...]
    share: float
    is_fresh: bool = False
    at_once: int = 1
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def rows(self, toy: bool) -> tuple[str, ...]:
        """Return the names of the rows."""
        return self.toy_names if toy else self.names

    def environment(self) -> dict[str, str]:
        """Return the environment variables of a child process."""
        flags = f"{os.environ.get('XLA_FLAGS', '')} {self.env.get('XLA_FLAGS', '')}".strip()
        return {**self.env, **({"XLA_FLAGS": flags} if flags else {})}


_MODULE = "device.{}".format
PARTS: Mapping[str, Part] = {
    "peaks": Part(
        _MODULE("_peaks"), _programs.NAMES, _programs.TOY_NAMES, 80, is_fresh=True, at_once=4,
        env={
            "XLA_FLAGS": "--xla_gpu_autotune_level=0",
            # An allocator that grows on demand gives pieces of twice the size, and counts them.
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2",
        },
    ),
    "seconds": Part(_MODULE("_seconds"), _programs.NAMES, _programs.TOY_NAMES[:1], 150),
    "sizes": Part(
        _MODULE("_sizes"), _sizes.NAMES, _sizes.TOY_NAMES, 170, is_fresh=True,
        env={"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"},
    ),
    "selection": Part(_MODULE("_selection"), _selection.NAMES, _selection.TOY_NAMES, 35),
    "offload": Part(_MODULE("_offload"), _offload.NAMES, _offload.TOY_NAMES, 35),
    "speed": Part(_MODULE("_speed"), _speed.NAMES, _speed.TOY_NAMES, 60),
    "torch": Part(
        _MODULE("_torch"), _torch.NAMES, _torch.TOY_NAMES, 120,
        env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    ),
    "measured": Part(_MODULE("_measured"), _measured.NAMES, _measured.TOY_NAMES, 60),
}  # fmt: skip
"""The parts by name, the most valuable first. Each gets its share of the time."""

Save = Callable[[], None]
Status = Callable[[str], None]
_LATE, _INTERRUPTED = "its time was over", "interrupted"


def missing_rows(part: Part, found: Report, toy: bool) -> list[str]:
    """Return the rows that a part's report does not have, or not whole.

    Those that were not done when the time was over come last, so that they keep no others waiting.
    """
    rows, late = found.get("rows", {}), found.get("late", ())
    missing = [name for name in part.rows(toy) if rows.get(name, {"partial": True}).get("partial")]
    return sorted(missing, key=lambda name: name in late)


def run_parts(
    names: list[str], report: Report, options: Mapping[str, Any], save: Save, status: Status
) -> None:
    """Measure what parts lack, each within its share of the time that is left.

    Args:
        names: The parts.
        report: What is measured already, by part; filled.
        options: `toy`, `platform`, `plans`, `kernels`, and `seconds`, the time of all parts.
        save: Called after each row.
        status: Shows what is being measured.
    """
    end, toy = time.monotonic() + options["seconds"], options["toy"]
    wanted = [each for each in names if missing_rows(PARTS[each], report.get(each, {}), toy)]
    for i, name in enumerate(wanted):
        left = end - time.monotonic()
        shares = [PARTS[each].share for each in wanted[i:]]
        if left <= 0:
            return
        found = report.setdefault(name, {"rows": {}})
        began = time.monotonic()
        limit = left * shares[0] / sum(shares)
        shown = functools.partial(_shown, status, name)
        run_part(PARTS[name], found, options, limit, save, shown)
        found["seconds"] = found.get("seconds", 0.0) + time.monotonic() - began
        save()


def _shown(status: Status, part: str, text: str) -> None:
    status(f"{part}: {text}")


def run_part(
    part: Part, found: Report, options: Mapping[str, Any], limit: float, save: Save, status: Status
) -> None:
    """Measure the rows that a part lacks; what it does not reach in its time stays missing.

    A row that ends its process has the error, and the next row begins another process. Where a
    process fails before it has named its device, or has another one than the rows that are there,
    the part ends; `stopped` says why.
    """
    found.pop("stopped", None)
    run = _PartRun(part, found, options, time.monotonic() + limit, save, status)
    with ThreadPoolExecutor(part.at_once) as pool:
        try:
            list(pool.map(run.measured, run.requests()))
        except KeyboardInterrupt:
            found["stopped"] = _INTERRUPTED
            raise


@dataclasses.dataclass(frozen=True)
class _PartRun:
    """A part while it runs; several rows of it may be measured at the same time."""

    part: Part
    found: Report
    options: Mapping[str, Any]
    end: float
    save: Save
    status: Status
    lock: Any = dataclasses.field(default_factory=threading.RLock)

    def missing(self, among: Sequence[str] | None = None) -> list[str]:
        """Return the rows that are missing, of some or of all."""
        names = missing_rows(self.part, self.found, self.options["toy"])
        return [name for name in names if among is None or name in among]

    def requests(self) -> list[list[str]]:
        """Return the rows that a process is asked for, process by process."""
        missing = self.missing()
        return [[name] for name in missing] if self.part.is_fresh else [missing]

    def measured(self, asked: list[str]) -> None:
        """Measure rows in a process, and what its end leaves of them in another."""
        while (names := self.missing(asked)) and "stopped" not in self.found:
            stopped, error = self._asked(names)
            with self.lock:
                if stopped:
                    # The first cause; others follow from it.
                    self.found.setdefault("stopped", stopped)
                elif rest := self.missing(names):
                    row = self.found["rows"].setdefault(rest[0], {})
                    row["error"] = error
                    row.pop("partial", None)
                    self.save()

    def _asked(self, asked: list[str]) -> tuple[str | None, str]:
        """Run one process; return why the part ends, and what the process failed with."""
        left = self.end - time.monotonic()
        if left <= 0:
            return _LATE, ""
        self.status(asked[0])
        passed = ("toy", "platform", "plans", "kernels")
        settings = {"rows": asked} | {name: self.options[name] for name in passed}
        error, opened = "it ended without a result", False
        answers = child.results_of(self.part.module, settings, self.part.environment(), left)
        with contextlib.closing(answers):
            try:
                for each in answers:
                    with self.lock:
                        if "about" in each:
                            opened, about = True, self.found.setdefault("about", each["about"])
                            if about["device"] != each["about"]["device"]:
                                return f"its rows are of {about['device']}", ""
                            continue
                        _merge(self.found["rows"].setdefault(each["row"], {}), each)
                        self.save()
            except TimeoutError:
                with self.lock:
                    rest = self.missing(asked)
                    self.found["late"] = [*self.found.get("late", ()), *rest[:1]]
                return _LATE, ""
            except RuntimeError as failed:
                error = str(failed).strip().splitlines()[-1][:500]
                if error == "KeyboardInterrupt":
                    # Ctrl-C ends the children first; a row of theirs is measured by the next run.
                    return _INTERRUPTED, ""
        return (None if opened else error), error


def _merge(row: dict[str, Any], answer: Mapping[str, Any]) -> None:
    """Put what a process found into a row, which is partial until the process is done with it."""
    if answer.get("done"):
        row.pop("partial", None)
    else:
        row |= {"partial": True, **answer["found"]}
