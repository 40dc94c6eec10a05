"""The values of a report, and checks of reports given to its methods.

Text and plot are made from `ReportData`; `Report` adds the methods that call them.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from jrc.remat._compiled.collectives import Collective
from jrc.remat._gradient.compiled_memory import Memory
from jrc.remat._gradient.opaque import Opaque
from jrc.remat._gradient.recompute_count import Rerun
from jrc.remat._gradient.saved_values import SavedValue, total_bytes
from jrc.remat._report.compiled_schedule import LivePoint
from jrc.remat._report.remedy import Remedy
from jrc.remat._time.seconds import Seconds


@dataclasses.dataclass(frozen=True)
class ReportData:
    """The fields of `jrc.Report`, which documents them, and the sums over them."""

    name: str
    saved: tuple[SavedValue, ...]
    rerun: tuple[Rerun, ...]
    flops: int
    memory: Memory
    live: tuple[LivePoint, ...]
    collectives: tuple[Collective, ...]
    warnings: tuple[str, ...]
    device: str
    opaque: tuple[Opaque, ...] = ()
    time: Seconds | None = None
    is_gradient: bool = True
    constants: int = 0
    donatable: int = 0
    donatable_argnums: tuple[int, ...] = ()
    versions: tuple[str, ...] = ()
    tried: tuple[Remedy, ...] = ()
    argnums: tuple[int, ...] = ()

    @property
    def saved_bytes(self) -> int:
        """Bytes of all saved values on the device."""
        return total_bytes(self.saved)

    @property
    def rerun_flops(self) -> int:
        """Floating-point operations of recomputation."""
        return sum(each.flops for each in self.rerun)

    @property
    def sent_bytes(self) -> int:
        """Bytes that one device sends to others."""
        return sum(each.sent for each in self.collectives)

    @property
    def rerun_sent_bytes(self) -> int:
        """Bytes that one device sends to others in recomputation."""
        return sum(each.rerun_sent for each in self.collectives)

    @property
    def by_line(self) -> Mapping[str, int]:
        """Saved bytes on the device for each source line, the largest first."""
        return _totals((each.place, each) for each in self.saved)

    @property
    def by_mark(self) -> Mapping[str, int]:
        """Saved bytes on the device for each mark, the largest first."""
        return _totals((each.mark, each) for each in self.saved if each.mark is not None)


def check_reports(reports: Iterable[Any]) -> None:
    """Raise a `TypeError` if an entry is no report."""
    for report in reports:
        if not isinstance(report, ReportData):
            raise TypeError(
                f"every other report must be a jrc.Report, got {type(report).__name__}. "
                "Read a stored one with jrc.Report.from_json(text)."
            )


def check_names(names: Any) -> list[str]:
    """Return names of reports as a list, after checking that they are strings.

    Raises:
        TypeError: If they are no list of strings.
    """
    found = list(names) if isinstance(names, Iterable) and not isinstance(names, str) else [None]
    if not all(isinstance(name, str) for name in found):
        raise TypeError(
            f"names must be a list of strings, one for each report, got {names!r}. Write "
            "names=['before', 'after']."
        )
    return found


def _totals(pairs: Iterable[tuple[str, SavedValue]]) -> dict[str, int]:
    """Return the bytes on the device for each name, the largest first."""
    found: dict[str, list[SavedValue]] = {}
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    totals = {name: total_bytes(values) for name, values in found.items()}
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))
