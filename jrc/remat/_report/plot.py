"""The figure of `Report.plot`: live bytes along the compiled program, forward and backward."""

import base64
import dataclasses
import io
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from jrc.remat._report.report_data import ReportData, check_names, check_reports

_MIB = 2**20
_COLOURS = ("#c44e52", "#4c72b0", "#55a868", "#8172b2", "#ccb974", "#64b5cd")
_GREY = "#5a5a5a"
# Letters of marks' names that fit below the axis.
_MAX_LETTERS = 56


@dataclasses.dataclass(frozen=True)
class Curve:
    """The points of one report's curve.

    Attributes:
        x: The position of each instruction: forward pass from 0 to 1, backward pass from 1 to 2;
            of a function as it is from 0 to 2.
        y: Live MiB while it runs.
        marks: `(x, y, name)` of each marked value.
        peak: `(x, y)` of the highest point.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]
    marks: tuple[tuple[float, float, str], ...]
    peak: tuple[float, float]


def curve_of(report: ReportData) -> Curve:
    """Return the curve of a report."""
    points = report.live
    count = len(points)
    start = backward_start([point.phase for point in points])
    first, rest = (start, count - start) if report.is_gradient else (count / 2, count / 2)
    x = tuple(
        (i + 0.5) / first if i < first else 1 + (i - first + 0.5) / rest for i in range(count)
    )
    y = tuple(point.bytes / _MIB for point in points)
    marks = tuple(
        (x[i], y[i], point.mark) for i, point in enumerate(points) if point.mark is not None
    )
    highest = max(range(len(y)), key=y.__getitem__, default=0)
    return Curve(x, y, marks, (x[highest], y[highest]) if y else (0.0, 0.0))


def backward_start(phases: Sequence[str]) -> int:
    """Return the position at which the backward pass begins.

    XLA schedules some instructions of one pass inside the other: the position is the one with the
    fewest of them on the wrong side.
    """
    wrong = fewest = phases.count("forward")
    best = 0
    for i, phase in enumerate(phases):
        wrong += -1 if phase == "forward" else 1
        if wrong < fewest:
            fewest, best = wrong, i + 1
    return best


def plot_reports(
    path: str | pathlib.Path, reports: Sequence[ReportData], names: Sequence[str] | None
) -> None:
    """Draw reports into one figure and write it; see `jrc.Report.plot`."""
    suffix = check_picture(path)
    check_reports(reports)
    names = [report.name for report in reports] if names is None else check_names(names)
    if len(names) != len(reports):
        raise ValueError(
            f"names must be one for each of the {len(reports)} reports, got {names!r}. "
            "Leave names out to take the functions' own."
        )
    for report in (each for each in reports if not each.live):
        raise ValueError(
            f"report must have live bytes to be drawn, got none of `{report.name}`: its program "
            "makes no arrays, or the compiler refuses it, as a warning of the report says then. "
            "Draw a program that compiles; jrc.plan makes a loss fit."
        )
    # Drawn before the file is opened: an existing file stays as it is if drawing fails.
    picture = _picture(reports, names, suffix, 200)
    pathlib.Path(path).write_bytes(picture)


def picture_html(report: ReportData) -> str:
    """Return the figure of a report as HTML; empty without matplotlib, or with nothing to draw."""
    if not report.live:
        return ""
    try:
        picture = _picture([report], [report.name], "png", 100)
    except ImportError:
        return ""
    data = base64.b64encode(picture).decode()
    return f'<img alt="live bytes along the program" src="data:image/png;base64,{data}">'


def _picture(reports: Sequence[ReportData], names: Sequence[str], format: str, dpi: int) -> bytes:
    """Return the figure of some reports as a file's contents."""
    figure = _figure()
    axes = figure.subplots()
    curves = [curve_of(report) for report in reports]
    top = max((curve.peak[1] for curve in curves), default=0) or 1.0
    _frame(axes, top, any(report.is_gradient for report in reports))
    for i, (curve, name) in enumerate(zip(curves, names, strict=True)):
        _draw(axes, curve, name, _COLOURS[i % len(_COLOURS)])
    _name_marks(axes, curves[0])
    axes.legend(loc="upper left", frameon=False, fontsize=9, bbox_to_anchor=(0.0, 0.93))
    picture = io.BytesIO()
    figure.savefig(picture, dpi=dpi, format=format)
    return picture.getvalue()


def check_picture(path: object) -> str:
    """Return the format of a figure, after checking that it can be written to this path.

    Raises:
        ImportError: If matplotlib is not installed.
        TypeError: If `path` is no path.
        ValueError: If its suffix is no format that matplotlib writes.
        OSError: If there is no such folder, or it cannot be written to.
    """
    known = _figure().canvas.get_supported_filetypes()
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"path must be text or a pathlib.Path, got {type(path).__name__}. Write 'memory.png'."
        )
    suffix = pathlib.Path(path).suffix[1:].lower()
    if suffix not in known:
        raise ValueError(
            f"path must end in a format, one of .{', .'.join(sorted(known))}, got "
            f"{str(path)!r}. Write 'memory.png'."
        )
    check_writable(path)
    return suffix


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise the `OSError` that writing this file would raise; nothing is written.

    Raises:
        OSError: If `path` is a folder, or in none, or may not be written.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        raise IsADirectoryError(
            f"path must be a file, got the folder {str(path)!r}. Add a file name."
        )
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"path must be in a folder that exists, got {str(path)!r}. Make "
            f"{str(path.parent)!r} first."
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(f"path must be writable, got {str(path)!r}. Choose another folder.")


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            "matplotlib must be installed. Run pip install '.[plot]' in a checkout."
        ) from None
    return Figure(figsize=(7.2, 3.6), layout="constrained")


def _frame(axes: Any, top: float, has_gradient: bool) -> None:
    if has_gradient:
        axes.axvspan(1, 2, color="#f1f1f4", zorder=0, linewidth=0)
        axes.axvline(1, color="#b8b8c0", linewidth=0.8, zorder=1)
    for x, word in ((0.5, "forward pass"), (1.5, "backward pass")) if has_gradient else ():
        axes.text(x, 1.18 * top, word, ha="center", va="top", color=_GREY, fontsize=10)
    axes.set_xlim(0, 2)
    axes.set_ylim(0, 1.22 * top)
    axes.set_xlabel("the compiled program, in the order in which it runs", fontsize=10)
    axes.set_ylabel("temporaries and results, MiB", fontsize=10)
    axes.tick_params(axis="y", labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _draw(axes: Any, curve: Curve, name: str, colour: str) -> None:
    from matplotlib.patheffects import withStroke

    axes.plot(
        curve.x,
        curve.y,
        color=colour,
        linewidth=1.3,
        label=_literal(name),
        drawstyle="steps-mid",
        zorder=3,
    )
    axes.fill_between(curve.x, curve.y, step="mid", color=colour, alpha=0.12, linewidth=0, zorder=2)
    if curve.marks:
        xs, ys, _ = zip(*curve.marks, strict=True)
        axes.plot(xs, ys, "o", color=colour, markersize=3.2, markeredgecolor="white",
                  markeredgewidth=0.5, zorder=4)  # fmt: skip
    x, y = curve.peak
    axes.plot([x], [y], "v", color=colour, markersize=5, zorder=5)
    # At the edges the text is beside the point, so that it stays inside of the figure.
    side = "left" if x < 0.2 else "right" if x > 1.8 else "center"
    text = axes.annotate(
        f"{y:,.0f} MiB" if y >= 10 else f"{y:,.2f} MiB", (x, y), xytext=(0, 6),
        textcoords="offset points", ha=side, va="bottom", color=colour, fontsize=9,
        fontweight="bold", zorder=6,
    )  # fmt: skip
    text.set_path_effects([withStroke(linewidth=2.5, foreground="white")])


def _literal(name: str) -> str:
    """Return a name as matplotlib shows it: no formula, and not left out of the legend."""
    shown = name.replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def _name_marks(axes: Any, curve: Curve) -> None:
    """Draw the first report's marks below the axis, with as many names as fit."""
    for x, y, _ in curve.marks:
        axes.plot([x, x], [0, y], color=_GREY, linewidth=0.4, linestyle=":", zorder=1)
    longest = max((len(name) for *_, name in curve.marks), default=1)
    stride = -(-len(curve.marks) * longest // _MAX_LETTERS) or 1
    named = curve.marks[::stride]
    axes.set_xticks([x for x, *_ in named], [_literal(name) for *_, name in named], fontsize=6.5)
    axes.tick_params(axis="x", length=2.5, color=_GREY, labelcolor=_GREY)
