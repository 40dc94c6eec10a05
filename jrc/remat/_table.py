"""Tables as text."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as plain text, the first two columns to the left, numbers to the right."""
    out = Table(box=box.SIMPLE_HEAD)
    for i, head in enumerate(heads):
        out.add_column(head, justify="left" if i < 2 else "right")
    for row in rows:
        out.add_row(*row)
    console = Console(width=110, color_system=None)
    with console.capture() as capture:
        console.print(out)
    return "\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip())
