"""What is known of a gradient: a report as a value, and as JSON."""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jrc._validate import check_json
from jrc.remat._gradient.compiled_memory import Memory
from jrc.remat._gradient.saved_values import SavedValue, total_bytes
from jrc.remat._report.compiled_schedule import Collective, LivePoint
from jrc.remat._report.recompute_count import Rerun

_FORMAT = "jrc.Report/1"

_PARTS = {"saved": SavedValue, "rerun": Rerun, "live": LivePoint, "collectives": Collective}

_FIELDS = {
    "name": str,
    "saved": [{"bytes": int, "dtype": str, "primitive": str, "place": str, "times": int}],
    "rerun": [{"primitive": str, "count": int, "flops": int}],
    "flops": int,
    "memory": {"arguments": int, "outputs": int, "temporaries": int, "aliased": int},
    "live": [{"bytes": int, "phase": str}],
    "collectives": [{"kind": str, "count": int, "bytes": int, "rerun": int}],
    "warnings": [str],
    "device": str,
}


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
        from jrc.remat._report.text import report_text

        return report_text(self)

    def compare(self, other: "Report", names: Sequence[str] = ("before", "after")) -> str:
        """This report and another side by side.

        Args:
            other: The other report.
            names: What to call the two.

        Returns:
            A table as text: peak, saved bytes, re-run, and the lines that differ most.

        Raises:
            TypeError: If `other` is no report, or `names` no list of strings.
            ValueError: If there are not two names.
        """
        from jrc.remat._report.text import compare_text

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
            ValueError: If the text is something else, or was changed so that it is none any more.
        """
        try:
            fields = json.loads(text)
            check_json(fields, _FORMAT, _FIELDS)
            for name, kind in _PARTS.items():
                fields[name] = tuple(kind(**_frozen(each)) for each in fields[name])
            del fields["format"]
            return cls(**_frozen(fields | {"memory": Memory(**fields["memory"])}))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"jrc.Report.from_json: takes a report in the format {_FORMAT!r}, as "
                f"report.to_json() writes it ({type(error).__name__}: {error}). Write it again "
                "with jrc.explain(...).to_json()."
            ) from error

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
            TypeError: If the path is none, one of `others` no report, or `names` no strings.
            ValueError: If there are not as many names as reports, or the ending says no format.
            OSError: If there is no such folder, or the file cannot be written.
        """
        from jrc.remat._report.plot import plot_reports

        plot_reports(path, (self, *others), names)


def _totals(pairs: Iterable[tuple[str, SavedValue]]) -> dict[str, int]:
    found: dict[str, list[SavedValue]] = {}
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    totals = {name: total_bytes(values) for name, values in found.items()}
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))


def check_reports(reports: Iterable[Any], who: str) -> None:
    """Refuse what `jrc.explain` does not return."""
    for report in reports:
        if not isinstance(report, Report):
            raise TypeError(
                f"{who}: takes reports of jrc.explain; got {type(report).__name__}. Read a stored "
                "one with jrc.Report.from_json(text)."
            )


def check_names(names: Any, who: str) -> list[str]:
    """Names of reports, as a list."""
    found = list(names) if isinstance(names, Iterable) and not isinstance(names, str) else [None]
    if not all(isinstance(name, str) for name in found):
        raise TypeError(
            f"{who}: names is a list of strings, one for each report; got {names!r}. Write "
            "names=['before', 'after']."
        )
    return found


def _frozen(fields: Mapping[str, Any]) -> dict[str, Any]:
    """JSON knows no tuples."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
