"""A table as one value that renders for a terminal and as Markdown, and numbers for its cells.

>>> table = Table("Two rows", ("", "ms"), (("a", "1.0"), ("b", "2.0")))
>>> print(table.markdown(), end="")
Two rows:
<BLANKLINE>
|  | ms |
|---|---|
| a | 1.0 |
| b | 2.0 |
"""

import dataclasses
from collections.abc import Sequence

from rich import box
from rich.markup import escape
from rich.table import Table as RichTable

Row = Sequence[str]


@dataclasses.dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        title: What the columns are, with units; may be empty.
        heads: The names of the columns. The first column and those without a name have words, all
            others numbers.
        rows: The cells, as text.
        note: A sentence that stands below; may be empty.
    """

    title: str
    heads: Row
    rows: Sequence[Row]
    note: str = ""

    def terminal(self) -> RichTable:
        """Return the table for a `rich` console: numbers to the right."""
        table = RichTable(
            title=escape(self.title), caption=escape(self.note) or None, box=box.SIMPLE_HEAD
        )
        for i, head in enumerate(self.heads):
            table.add_column(escape(head), justify="right" if i and head else "left")
        for row in self.rows:
            table.add_row(*map(escape, row))
        return table

    def markdown(self) -> str:
        """Return the title as a paragraph, the table, and the note, as Markdown."""
        head, *body = (f"| {' | '.join(row)} |\n" for row in (self.heads, *self.rows))
        above = f"{self.title}:\n\n" if self.title else ""
        below = f"\n{self.note}\n" if self.note else ""
        return above + head + "|---" * len(self.heads) + "|\n" + "".join(body) + below


def mib(size: float, digits: int = 0) -> str:
    """Return bytes of memory as a number of MiB, for a column that has this unit."""
    return f"{size / 2**20:,.{digits}f}"


def megabytes(size: float, digits: int = 1) -> str:
    """Return bytes on a network as a number of MB (10^6), for a column that has this unit."""
    return f"{size / 1e6:,.{digits}f}"


def milliseconds(seconds: float, digits: int = 1) -> str:
    """Return seconds as a number of milliseconds, for a column that has this unit."""
    return f"{1e3 * seconds:,.{digits}f}"
