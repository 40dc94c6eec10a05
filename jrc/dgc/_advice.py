"""Advice as text: a table, and what it comes to in a sentence."""

import math
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from jrc._text import bandwidth_text, network_text, seconds_text

if TYPE_CHECKING:
    from jrc.dgc._cost_model import DGCAdvice


def advice_text(advice: "DGCAdvice") -> str:
    """The whole advice for a terminal."""
    replicas = f"{advice.replicas} replica{'s' if advice.replicas > 1 else ''}"
    head = (
        f"{advice.entries:,} entries on {replicas} at "
        f"{bandwidth_text(advice.bandwidth)}, each sends {advice.sent:,} entries"
    )
    overhead = f"Compression itself costs {seconds_text(advice.overhead)} a step."
    return "\n".join([head, _table(advice), overhead, *_sentences(advice)])


def _table(advice: "DGCAdvice") -> str:
    ways = {"no compression": advice.uncompressed, "allgather": advice.allgather}
    ways |= {"sharded": advice.sharded, "dense": advice.dense}
    out = Table(box=box.SIMPLE_HEAD)
    out.add_column("")
    out.add_column("bytes sent", justify="right")
    out.add_column("step", justify="right")
    for name, cost in ways.items():
        out.add_row(name, network_text(cost.bytes), seconds_text(cost.seconds))
    console = Console(width=110, color_system=None)
    with console.capture() as capture:
        console.print(out)
    return "\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip())


def _sentences(advice: "DGCAdvice") -> tuple[str, str]:
    """Whether it pays, by how much, and where that would change."""
    if not advice.entries:
        return "Nothing is compressed: every tensor is below min_size.", "Lower min_size."
    if advice.pays:
        where = _where(advice.break_even, "It pays at any bandwidth", "It pays below")
        gained = f"with exchange='{advice.best}' a step is {advice.speedup:.3g} x as quick"
        return f"Compression pays: {gained} as without.", f"{where}."
    longer = f"{1 / advice.speedup:.3g} x" if advice.speedup else "many times"
    where = _where(advice.break_even, "It would pay at any bandwidth", "It would pay below")
    lost = f"a step takes {longer} the time of one without"
    return f"Compression does not pay: {lost}.", f"{where}."


def _where(bandwidth: float, always: str, below: str) -> str:
    if bandwidth == 0:
        return "It would pay at no bandwidth"
    return always if bandwidth == math.inf else f"{below} {bandwidth_text(bandwidth)}"
