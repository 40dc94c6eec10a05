"""Quantities and tables as text: the only place where a number gets a unit.

Memory is counted in powers of 1024, as XLA and device vendors count it; what crosses a network
in powers of 1000, as networks are sold.

>>> memory_text(1536 * 1024), network_text(1.5e6), seconds_text(0.0125), flops_text(2e9)
('1.5 MiB', '1.5 MB', '12.5 ms', '2 GFLOP')
"""

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

_WIDTH = 110


def memory_text(size: float) -> str:
    """Bytes of memory: `1.5 MiB`."""
    return _scaled(size, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def exact_memory_text(size: int) -> str:
    """Bytes of memory, and the exact number to copy: `1.5 MiB (1,572,864 bytes)`."""
    return memory_text(size) if size < 1024 else f"{memory_text(size)} ({size:,} bytes)"


def network_text(size: float) -> str:
    """Bytes that cross a network: `1.5 MB`."""
    return _scaled(size, 1000, ("B", "kB", "MB", "GB", "TB"))


def bandwidth_text(rate: float) -> str:
    """Bytes per second as networks are sold, in bits: `1 Gbit/s`."""
    return _scaled(8 * rate, 1000, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"))


def flops_text(count: float) -> str:
    """Floating-point operations: `1.5 GFLOP`."""
    return _scaled(count, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def seconds_text(seconds: float) -> str:
    """Seconds in a unit that leaves few digits: `12.5 ms`."""
    if seconds >= 1 or seconds == 0:
        return f"{seconds:,.4g} s"
    return f"{seconds * 1e3:,.4g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:,.4g} us"


def exchange_text(sent: int, again: int, bandwidth: float | None) -> str:
    """What a device sends to others, and in recomputation, with the time at bytes per second.

    >>> exchange_text(3 * 2**30, 2**30, 200e9)
    'a device sends 3 GiB to others, 1 GiB in recomputation: 16.11 ms and 5.369 ms at 200 GB/s'
    """
    sizes = [f"{memory_text(sent)} to others"]
    sizes += [f"{memory_text(again)} in recomputation"] if again else []
    text = f"a device sends {', '.join(sizes)}"
    if not bandwidth:
        return text
    times = [seconds_text(n / bandwidth) for n in (sent, again) if n]
    return f"{text}: {' and '.join(times)} at {network_text(bandwidth)}/s"


def table_text(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as plain text, the first two columns to the left, numbers to the right."""
    out = Table(box=box.SIMPLE_HEAD)
    for i, head in enumerate(heads):
        out.add_column(head, justify="left" if i < 2 else "right")
    for row in rows:
        out.add_row(*row)
    console = Console(width=_WIDTH, color_system=None)
    with console.capture() as capture:
        console.print(out)
    return "\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip())


def _scaled(number: float, base: int, units: Sequence[str]) -> str:
    """Four significant digits and the largest unit that leaves at least 1."""
    if abs(number) < 1:
        return f"{number:,.4g} {units[0]}"
    # The small term takes care of exact powers, whose logarithm may come out a little low.
    power = min(int(math.log(abs(number), base) + 1e-9), len(units) - 1)
    return f"{number / base**power:,.4g} {units[power]}"
