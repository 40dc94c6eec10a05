"""What is known of a gradient: a report as a value, and as JSON."""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jrc.remat._memory import Memory
from jrc.remat._rerun_count import Rerun
from jrc.remat._saved import SavedValue, total_bytes
from jrc.remat._schedule import Collective, LivePoint

_FORMAT = "jrc.Report/1"


@dataclasses.dataclass(frozen=True)
class Report:
    """What the gradient of a function keeps and runs again; prints as a table.

    Attributes:
        name: The function.
        saved: Every value that the derivative keeps, in program order, with `bytes`, `shape`,
            `dtype`, `primitive`, `mark`, `place` (`net.py:31`), `times` (the length of the loops
            around it), `origin` (the constructs inside of which it is made) and `memory`.
        rerun: What the backward pass runs again, per operator: `primitive`, `count`, `flops`;
            the dearest first.
        flops: Floating-point operations of value and gradient, loops times their length.
        memory: Bytes of the compiled value and gradient, as XLA states them: `arguments`,
            `outputs`, `temporaries`, `aliased`, and their `peak`.
        live: One entry for each instruction of the compiled program in the order in which they
            run: `bytes` of temporaries and results so far, `phase`, `mark`.
        collectives: What crosses between devices, per kind: `kind`, `count`, `bytes`, `rerun`.
        warnings: Recomputation without effect, each with the way out.
        device: The kind of device that it was compiled for.
    """

    name: str
    saved: tuple[SavedValue, ...]
    rerun: tuple[Rerun, ...]
    flops: int
    memory: Memory
    live: tuple[LivePoint, ...]
    collectives: tuple[Collective, ...]
    warnings: tuple[str, ...]
    device: str

    @property
    def saved_bytes(self) -> int:
        """Bytes of all saved values on the device."""
        return total_bytes(self.saved)

    @property
    def rerun_flops(self) -> int:
        """Floating-point operations that run again."""
        return sum(each.flops for each in self.rerun)

    @property
    def by_line(self) -> Mapping[str, int]:
        """Saved bytes on the device for each source line, the largest first."""
        return _totals((each.place, each) for each in self.saved)

    @property
    def by_mark(self) -> Mapping[str, int]:
        """Saved bytes on the device for each mark, the largest first."""
        return _totals((each.mark, each) for each in self.saved if each.mark is not None)

    def __str__(self) -> str:
        """The report as a table, the largest values first and the rest summed."""
        from jrc.remat._report_text import report_text

        return report_text(self)

    def compare(self, other: "Report", names: Sequence[str] = ("before", "after")) -> str:
        """This report and another side by side.

        Args:
            other: The other report.
            names: What to call the two.

        Returns:
            A table as text: peak, saved bytes, re-run, and the lines that differ most.
        """
        from jrc.remat._report_text import compare_text

        return compare_text(self, other, names)

    def to_json(self) -> str:
        """The report as text that `from_json` reads."""
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> "Report":
        """The report that `to_json` wrote.

        Args:
            text: What `to_json` returned.

        Returns:
            An equal report.

        Raises:
            ValueError: If the text is something else.
        """
        fields = _loaded(text)
        parts = {"saved": SavedValue, "rerun": Rerun, "live": LivePoint, "collectives": Collective}
        for name, kind in parts.items():
            fields[name] = tuple(kind(**_frozen(each)) for each in fields[name])
        fields["memory"] = Memory(**fields["memory"])
        return cls(**_frozen(fields))

    def plot(
        self, path: str | pathlib.Path, *others: "Report", names: Sequence[str] | None = None
    ) -> None:
        """Draw the live bytes along the program, of this report and of others.

        Args:
            path: Where the picture goes; its ending says the format (`.png`, `.pdf`, `.svg`).
            *others: More reports, drawn into the same picture.
            names: What to call the reports; by default their functions' names.

        Raises:
            ImportError: If matplotlib is not installed: `pip install 'jrc[plot]'`.
            TypeError: If the path is none, or one of `others` no report.
            ValueError: If there are not as many names as reports, or the ending says no format.
            OSError: If there is no such folder, or the file cannot be written.
        """
        from jrc.remat._report_plot import plot_reports

        plot_reports(path, (self, *others), names)


def _totals(pairs: Iterable[tuple[str, SavedValue]]) -> dict[str, int]:
    found: dict[str, list[SavedValue]] = {}
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    totals = {name: total_bytes(values) for name, values in found.items()}
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))


def _loaded(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"jrc.Report.from_json: takes what to_json wrote; {error}.") from None
    if not isinstance(fields, dict) or fields.pop("format", None) != _FORMAT:
        raise ValueError(
            f"jrc.Report.from_json: takes a report in the format {_FORMAT!r}; got another JSON "
            "value. Write it with report.to_json()."
        )
    return fields


def _frozen(fields: Mapping[str, Any]) -> dict[str, Any]:
    """JSON knows no tuples."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
