"""The parts of `benchmarks.device.all`, and how one is run: in child processes, within its time."""

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks._lib import child
from benchmarks._lib.report import Report
from benchmarks.device import _offload, _programs, _selection, _sizes, _speed


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the run.

    Attributes:
        module: Its module below `benchmarks`, run as a child process.
        names: Its rows, the most valuable first.
        toy_names: Its rows with `--toy`.
        share: Its share of the time.
        is_fresh: Whether each row is a process of its own.
        env: Environment variables of the process; `XLA_FLAGS` are added to those that are set.
    """

    module: str
    names: tuple[str, ...]
    toy_names: tuple[str, ...]
    share: float
    is_fresh: bool = False
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
        _MODULE("_peaks"), _programs.NAMES, _programs.TOY_NAMES, 120, is_fresh=True,
        env={"XLA_FLAGS": "--xla_gpu_autotune_level=0"},
    ),
    "seconds": Part(_MODULE("_seconds"), _programs.NAMES, _programs.TOY_NAMES[:1], 130),
    "sizes": Part(
        _MODULE("_sizes"), _sizes.NAMES, _sizes.TOY_NAMES, 150, is_fresh=True,
        env={"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"},
    ),
    "selection": Part(_MODULE("_selection"), _selection.NAMES, _selection.TOY_NAMES, 35),
    "offload": Part(_MODULE("_offload"), _offload.NAMES, _offload.TOY_NAMES, 35),
    "speed": Part(_MODULE("_speed"), _speed.NAMES, _speed.TOY_NAMES, 60),
}  # fmt: skip
"""The parts by name, the most valuable first. Shares are seconds of a run of nine minutes."""

Save = Callable[[], None]
Status = Callable[[str], None]
_LATE = "its time was over"


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
        options: `toy`, `platform`, and `seconds`, the time of all parts.
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
    end, rows = time.monotonic() + limit, found["rows"]
    found.pop("stopped", None)
    while names := missing_rows(part, found, options["toy"]):
        asked = names[:1] if part.is_fresh else names
        stopped, error = _asked(part, found, asked, options, end - time.monotonic(), save, status)
        if stopped:
            found["stopped"] = stopped
            return
        if rest := [name for name in asked if name in missing_rows(part, found, options["toy"])]:
            rows.setdefault(rest[0], {})["error"] = error
            rows[rest[0]].pop("partial", None)
            save()


def _asked(
    part: Part, found: Report, asked: list[str], options: Mapping[str, Any], left: float,
    save: Save, status: Status,
) -> tuple[str | None, str]:  # fmt: skip
    """Run one process; return why the part ends, and what the process failed with."""
    if left <= 0:
        return _LATE, ""
    status(asked[0])
    settings = {"rows": asked, "toy": options["toy"], "platform": options["platform"]}
    error, opened = "it ended without a result", False
    answers = child.results_of(part.module, settings, part.environment(), left)
    with contextlib.closing(answers):
        try:
            for each in answers:
                if "about" in each:
                    opened, about = True, found.setdefault("about", each["about"])
                    if about["device"] != each["about"]["device"]:
                        return f"its rows are of {about['device']}", ""
                    continue
                _merge(found["rows"].setdefault(each["row"], {}), each)
                save()
        except TimeoutError:
            rest = missing_rows(part, found, options["toy"])
            found["late"] = [*found.get("late", ()), *rest[:1]]
            return _LATE, ""
        except RuntimeError as failed:
            error = str(failed).strip().splitlines()[-1][:500]
    return (None if opened else error), error


def _merge(row: dict[str, Any], answer: Mapping[str, Any]) -> None:
    """Put what a process found into a row, which is partial until the process is done with it."""
    if answer.get("done"):
        row.pop("partial", None)
    else:
        row |= {"partial": True, **answer["found"]}
