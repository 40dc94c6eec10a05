"""Pictures: one style, a row of panels, a PNG file."""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks._lib.examples import pyplot

INK, GRID, GREY, BLUE, ORANGE = "#1f2933", "#e5e7eb", "#6b7280", "#0f62fe", "#d9480f"


def draw(
    path: pathlib.Path,
    title: str,
    panels: Sequence[Callable[[Any], None]],
    size: tuple[float, float],
) -> pathlib.Path | None:
    """Write a PNG of panels side by side.

    Args:
        path: The file.
        title: What all panels show.
        panels: Each is called with its matplotlib axes.
        size: Width and height of a panel, inches.

    Returns:
        The path, or None without matplotlib.
    """
    if (plt := pyplot()) is None:
        return None
    style = {"font.size": 12, "axes.edgecolor": "#9aa5b1", "text.color": INK}
    with plt.rc_context(style):
        figure, row = plt.subplots(
            1, len(panels), figsize=(size[0] * len(panels), size[1]), layout="constrained",
            squeeze=False,
        )  # fmt: skip
        figure.get_layout_engine().set(wspace=0.06)
        for axes, panel in zip(row[0], panels, strict=True):
            panel(axes)
            axes.grid(color=GRID, lw=0.8)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle(title, fontsize=15, weight="bold", x=0.01, ha="left")
        figure.savefig(path, dpi=100)
        plt.close(figure)
    return path
