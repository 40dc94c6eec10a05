"""The picture of `benchmarks.pytorch.saved_bytes`: the GPT, saved bytes against products re-run."""

import functools
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks._lib.examples import pictures
from benchmarks._lib.report import Report
from benchmarks.pytorch._tables import Found, ratio

MB = 10**6


def plot(report: Report, folder: pathlib.Path) -> pathlib.Path | None:
    """Write `peers.png`; return None without matplotlib, or where the GPT was not measured."""
    if "gpt" not in report["models"]:
        return None
    title = "Saved for the backward pass, against products run again"
    panel = functools.partial(_panel, found=report["models"]["gpt"], jax=report["jax"])
    return pictures.draw(folder / "peers.png", title, [panel], (11, 6))


def _panel(axes: Any, found: Found, jax: str) -> None:
    ours = functools.partial(axes.plot, color=pictures.BLUE)
    # No choice lies between two points: the one before is taken until the next fits.
    ours(*_points(found["front"], found), lw=2.4, drawstyle="steps-post",
         label="jrc, by saved bytes alone")  # fmt: skip
    ours(*_points(found["plans"], found), "o", mfc="white", mew=1.8, ms=7,
         label="jrc.plan, within a compiled peak")  # fmt: skip
    hand = _points(found["hand"].values(), found)
    axes.plot(*hand, "x", color=pictures.GREY, ms=7, mew=2, label="jax.checkpoint by hand")
    _of_torch(axes, found)
    there = f", PyTorch {found['about']['torch']}" if "about" in found else ""
    title = f"{found['title']}, float32, jax {jax}{there}"
    axes.set_title(title, fontsize=12, loc="left", pad=10)
    axes.set(xlabel="saved bytes, MB", ylabel="matrix products run again, % more FLOPs")
    axes.legend(frameon=False, loc="upper right")


def _of_torch(axes: Any, found: Found) -> None:
    ways = {name: row for name, row in found.get("ways", {}).items() if "saved" in row}
    budgets = {name: row for name, row in ways.items() if name.startswith("budget")}
    checkpoints = [row for name, row in ways.items() if name.startswith("checkpoint")]
    theirs = functools.partial(axes.plot, color=pictures.RED)
    if budgets:
        theirs(*_points(budgets.values(), found), "o:", lw=1.4, ms=7,
               label="PyTorch, activation_memory_budget")  # fmt: skip
        _label(axes, budgets, found)
    if checkpoints:
        theirs(*_points(checkpoints, found), "s", mfc="white", mew=1.8, ms=8,
               label="PyTorch, torch.utils.checkpoint")  # fmt: skip


def _points(rows: Iterable[Mapping[str, Any]], found: Found) -> tuple[Any, Any]:
    """Return saved MB, and recomputed products in percent of all."""
    pairs = [(row["saved"] / MB, 100 * (ratio(row, found) - 1)) for row in rows]
    return tuple(zip(*pairs, strict=True)) or ((), ())


def _label(axes: Any, budgets: Mapping[str, Any], found: Found) -> None:
    """Write each budget beside its point; those with the same point together."""
    points: dict[tuple[float, float], list[str]] = {}
    for name, row in budgets.items():
        (at,) = zip(*_points([row], found), strict=True)
        points.setdefault(at, []).append(name.removeprefix("budget "))
    for at, names in points.items():
        axes.annotate(
            ", ".join(names), at, xytext=(8, 7), textcoords="offset points", color=pictures.RED,
            fontsize=10,
        )  # fmt: skip
