"""Reports in files: what `jrc explain --json` writes, and the gate that `--against` is.

A file has one report, in the format of `jrc.Report.to_json`, or one for each of several targets:
`{"format": "jrc.Reports/1", "reports": {"h100": …, "v5e:1": …}}`.
"""

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence

from jrc import remat
from jrc._errors import listed
from jrc._text import memory_text
from jrc.cli._console import print_text
from jrc.cli._load_target import UsageError

_FORMAT = "jrc.Reports/1"


class PeakGrew(Exception):
    """A peak is larger than in an earlier report."""


def reports_text(reports: Mapping[str, remat.Report]) -> str:
    """Return the reports of several targets as the text of one file."""
    each = {name: json.loads(report.to_json()) for name, report in reports.items()}
    return json.dumps({"format": _FORMAT, "reports": each})


def read_base(path: str, targets: Sequence[str]) -> list[remat.Report]:
    """Return the earlier report of each target that was asked for; one where none was.

    Args:
        path: A file that `jrc explain --json` wrote.
        targets: The names of the targets that are asked for now.

    Raises:
        UsageError: If the file cannot be read, or has no report of one of the targets.
    """
    found = _read(path)
    if isinstance(found, remat.Report):
        if len(targets) < 2:
            return [found]
        raise UsageError(
            f"--against must have a report of each target, got {path}, which is one report, on "
            f"{found.device}. Write it again with --target {','.join(targets)} --json {path}."
        )
    if not targets:
        raise UsageError(
            f"--target must be given where --against has reports of targets, got none and {path} "
            f"with {listed(list(found))}. Write --target {','.join(found)}."
        )
    if missing := [name for name in targets if name not in found]:
        raise UsageError(
            f"--against must have a report of each target, got {path}, which has "
            f"{listed(list(found))} and not {listed(missing)}. Write it again with --target "
            f"{','.join(targets)} --json {path}."
        )
    return [found[name] for name in targets]


def check_bases(reports: Sequence[remat.Report], bases: Sequence[remat.Report], path: str) -> None:
    """Raise if an earlier report is of something else than the one that is set beside it.

    Args:
        reports: The report of each target; one where no target was asked for.
        bases: The earlier reports, in the same order.
        path: The file that the earlier reports were read from.

    Raises:
        UsageError: If the function's name, `argnums` or the device differ.
    """
    for what, base in ((_subject(a), _subject(b)) for a, b in zip(reports, bases, strict=True)):
        if what != base:
            raise UsageError(
                f"--against must be an earlier report of {what}, got {path}, which is of {base}. "
                "Give the options that it was made with, or write it again with --json."
            )


def _subject(report: remat.Report) -> str:
    """Return what a report is of: the function, what is differentiated, the device."""
    argnums = ",".join(map(str, report.argnums)) if report.is_gradient else "none"
    return f"`{report.name}` with --argnums {argnums} on {report.device}"


def refuse_growth(
    reports: Sequence[remat.Report],
    bases: Sequence[remat.Report],
    targets: Sequence[str],
    grown_by: Callable[[int], int],
    path: str,
) -> None:
    """Print each report beside its earlier one, and raise if a peak grew too much.

    Args:
        reports: The report of each target; one where no target was asked for.
        bases: The earlier reports, in the same order.
        targets: The names of the targets.
        grown_by: By how many bytes a peak of so many may grow.
        path: The file that the earlier reports were read from.

    Raises:
        PeakGrew: If one did.
    """
    grown = []
    names = [f"on {target} " for target in targets] or [""]
    for name, report, base in zip(names, reports, bases, strict=True):
        head = f"{name.strip()}:\n" if len(names) > 1 else ""
        print_text(f"\n{head}{base.compare(report, names=(path, 'now'))}")
        lost = min(base.memory.aliased - report.memory.aliased, report.donatable)
        if lost > 0:
            print_text(f"{memory_text(lost)} of arguments are no longer donated (donate_argnums)")
        before, now = base.memory.peak, report.memory.peak
        if now > before + grown_by(before):
            grown.append(
                f"{name}from {memory_text(before)} to {memory_text(now)}, by more than the "
                f"tolerance of {memory_text(grown_by(before))}"
            )
    if grown:
        tables = "tables above say" if len(names) > 1 else "table above says"
        raise PeakGrew(
            f"the peak of `{reports[0].name}` grew {', and '.join(grown)}. The {tables} where. If "
            "it is meant, write the file again with --json."
        )


def _read(path: str) -> remat.Report | dict[str, remat.Report]:
    """Return the report in a file, or its reports by the targets' names."""
    try:
        text = pathlib.Path(path).read_text()
    except OSError as error:
        raise UsageError(f"--against must be a file, got {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UsageError(f"--against must be a report, got {path}, which is no text.") from None
    try:
        several = _several(text)
        if several is None:
            return remat.Report.from_json(text)
        return {name: remat.Report.from_json(json.dumps(one)) for name, one in several.items()}
    except ValueError as error:
        said = str(error).removeprefix("jrc.Report.from_json: ")
        raise UsageError(f"--against: {path}: {said}") from None


def _several(text: str) -> dict[str, object] | None:
    """Return what stands for each target's report; `None` if the text is not of several."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        return None
    each = data.get("reports")
    # Text of no report is refused as that of one.
    return each if isinstance(each, dict) and each else None
