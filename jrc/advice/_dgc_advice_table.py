"""What `jrc.dgc_advice` returns, and its text."""

import math
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from jrc._text import bandwidth_text, network_text, seconds_text


class ExchangeCost(NamedTuple):
    """The cost of one exchange of gradients.

    Attributes:
        bytes: Bytes that one replica sends in a step; infinite where a leaf has too many entries to
            be sent with their positions.
        seconds: Time of the whole step.
    """

    bytes: float
    seconds: float


class DGCAdvice(NamedTuple):
    """The prediction of `jrc.dgc_advice`; prints as a table and a sentence.

    Attributes:
        uncompressed: Momentum with a dense all-reduce.
        allgather: Compression with `exchange="allgather"`.
        sharded: Compression with `exchange="sharded"`.
        dense: Compression with `exchange="dense"`.
        best: Name of the fastest of these three, for `exchange=`, or `"own"`.
        speedup: Time of a step without compression over that with the best exchange.
        pays: Whether compression makes the step faster.
        break_even: Bandwidth in bytes per second below which it does: 0 if at none, infinite if
            at any.
        replicas: N.
        entries: Entries of the compressed leaves.
        sent: Those of them that each replica sends.
        bandwidth: Bytes per second that a replica can send.
        overhead: Seconds that compression itself adds to a step.
        own: Compression with the exchange of your own; `None` without one.
    """

    uncompressed: ExchangeCost
    allgather: ExchangeCost
    sharded: ExchangeCost
    dense: ExchangeCost
    best: str
    speedup: float
    pays: bool
    break_even: float
    replicas: int
    entries: int
    sent: int
    bandwidth: float
    overhead: float
    own: ExchangeCost | None = None

    def __str__(self) -> str:
        return _text(self)


def _text(advice: DGCAdvice) -> str:
    """Return the table and the sentences below it."""
    replicas = f"{advice.replicas} replica{'s' if advice.replicas > 1 else ''}"
    head = (
        f"{advice.entries:,} entries on {replicas} at "
        f"{bandwidth_text(advice.bandwidth)}, each sends {advice.sent:,} entries"
    )
    overhead = f"Compression itself costs {seconds_text(advice.overhead)} a step."
    return "\n".join([head, _table(advice), overhead, *_sentences(advice)])


def _table(advice: DGCAdvice) -> str:
    ways = {"no compression": advice.uncompressed, "allgather": advice.allgather}
    ways |= {"sharded": advice.sharded, "dense": advice.dense}
    ways |= {} if advice.own is None else {"own": advice.own}
    out = Table(box=box.SIMPLE_HEAD)
    out.add_column("")
    out.add_column("bytes sent", justify="right")
    out.add_column("step", justify="right")
    for name, cost in ways.items():
        fits = cost.bytes < math.inf
        texts = (network_text(cost.bytes), seconds_text(cost.seconds)) if fits else ("-", "-")
        out.add_row(name, *texts)
    console = Console(width=110, color_system=None, force_jupyter=False, emoji=False)
    with console.capture() as capture:
        console.print(out)
    return "\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip())


def _sentences(advice: DGCAdvice) -> tuple[str, str]:
    """Return whether compression pays, and below which bandwidth."""
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
