"""Quantities, trees and tables as text: the only place where a number gets a unit.

Memory is counted in powers of 1024, as XLA and device vendors count it; what crosses a network
in powers of 1000, as networks are sold.

>>> memory_text(1536 * 1024), network_text(1.5e6), seconds_text(0.0125), flops_text(2e9)
('1.5 MiB', '1.5 MB', '12.5 ms', '2 GFLOP')
"""

import dataclasses
import html
import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

TEXT_WIDTH = 80
"""Columns of a terminal, which reports and tables are written for."""

# Between two columns of a table, and in one that is wider than a terminal.
_GAP, _TIGHT_GAP = 3, 2
# The least columns that a text gets in a table that is too wide.
_LEAST_TEXT = 12
# Of a tree's text: leaves that are shown one by one, and entries of one node.
_MOST_LEAVES = 16
_MOST_ENTRIES = 8


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
    """A table as plain text, the first two columns to the left, numbers to the right.

    Columns without an entry are left out. A table that is wider than a terminal of 80 columns has
    narrower gaps, and its heads and texts are broken; numbers never are.
    """
    filled = [i for i in range(len(heads)) if any(row[i] for row in rows)] or [*range(len(heads))]
    columns = [_Column(heads[i], [row[i] for row in rows], i < 2) for i in filled]
    fits = sum(each.natural + _GAP for each in columns) < TEXT_WIDTH
    widths = [each.natural for each in columns] if fits else _broken_widths(columns)
    out = Table(box=box.SIMPLE_HEAD, collapse_padding=not fits, pad_edge=fits, show_edge=fits)
    for each, width in zip(columns, widths, strict=True):
        side = "left" if each.is_left else "right"
        out.add_column(each.head, justify=side, width=width, overflow="fold")
    for row in rows:
        out.add_row(*(row[i] for i in filled))
    # Names of users are no markup.
    plain = {"markup": False, "emoji": False, "color_system": None, "force_jupyter": False}
    console = Console(width=sum(widths) + _GAP * len(widths) + 1, **plain)
    with console.capture() as capture:
        console.print(out)
    return "\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip())


class _Column(NamedTuple):
    """A column of a table, and how wide it is."""

    head: str
    cells: Sequence[str]
    is_left: bool

    @property
    def is_text(self) -> bool:
        """Whether its cells may be broken: numbers with their units are none."""
        return self.is_left or any(cell[:1].isalpha() for cell in self.cells)

    @property
    def natural(self) -> int:
        """Its width with nothing broken."""
        return max(map(cell_len, [self.head, *self.cells]))

    @property
    def words(self) -> int:
        """Its least width with no word broken, and no number."""
        cells = " ".join(self.cells).split() if self.is_text else self.cells
        return max(map(cell_len, ["", *self.head.split(), *cells]))


def _broken_widths(columns: Sequence[_Column]) -> list[int]:
    """Return the widths of columns that are too wide together.

    Heads over numbers are broken first, then texts, at blanks, and at last long words of texts.
    """
    widths = [each.natural for each in columns]
    least = [max(each.words, _LEAST_TEXT) if each.is_text else each.words for each in columns]
    texts = [i for i, each in enumerate(columns) if each.is_text]
    numbers = [i for i in range(len(columns)) if i not in texts]
    while sum(widths) + _TIGHT_GAP * (len(widths) - 1) > TEXT_WIDTH:
        wide = [i for i in numbers if widths[i] > least[i]]
        wide = wide or [i for i in texts if widths[i] > least[i]]
        wide = wide or [i for i in texts if widths[i] > _LEAST_TEXT]
        if not wide:
            break
        widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


class Grid(NamedTuple):
    """A table: text in a terminal, HTML in a notebook."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        return table_text(self.heads, self.rows)

    def to_html(self) -> str:
        """Return the table as HTML; the first two columns to the left, numbers to the right."""
        lines = [_html_row("th", self.heads), *(_html_row("td", row) for row in self.rows)]
        return f"<table>{''.join(lines)}</table>"


def _html_row(tag: str, cells: Sequence[str]) -> str:
    sides = ["left" if i < 2 else "right" for i in range(len(cells))]
    each = (
        f'<{tag} style="text-align: {side}">{html.escape(cell)}</{tag}>'
        for cell, side in zip(cells, sides, strict=True)
    )
    return f"<tr>{''.join(each)}</tr>"


def text_of(parts: Sequence[str | Grid]) -> str:
    """Return lines and tables as text."""
    return "\n".join(map(str, parts))


def html_of(parts: Sequence[str | Grid]) -> str:
    """Return lines and tables as HTML, for a notebook.

    >>> html_of(["a < b"])
    '<div>a &lt; b</div>'
    """
    return "".join(
        part.to_html() if isinstance(part, Grid) else f"<div>{html.escape(part)}</div>"
        for part in parts
    )


def brief(tree: Any, most: int = _MOST_LEAVES) -> str:
    """Return a tree on one line: of scalars their values, of arrays dtype and shape.

    Args:
        tree: Any tree of arrays, such as a training state.
        most: Leaves that are shown one by one; of larger parts their number and bytes are shown.

    >>> brief({"w": np.ones((128, 4), np.float32), "step": np.int32(3), "none": None})
    "{'w': float32[128,4], 'step': 3, 'none': None}"
    >>> brief({"w": np.ones((1024, 4), np.float32), "b": np.ones(4, np.float32)}, most=1)
    'dict of 2 arrays, 16.02 KiB'
    """
    found = _entries(tree)
    if found is None:
        return _leaf_text(tree)
    head, pairs, tail = found
    leaves = jax.tree.leaves(tree)
    if len(leaves) > 1 and most < 2:
        size = sum(getattr(x, "size", 1) * _itemsize(x) for x in leaves)
        return f"{type(tree).__name__} of {len(leaves):,} arrays, {memory_text(size)}"
    inner = most if len(leaves) <= most else most // max(len(pairs), 1) // 2
    # All fields of a class, and some entries of a dict or a list.
    end = len(pairs) if head.endswith("(") and len(head) > 1 else _MOST_ENTRIES
    shown = [f"{name}{brief(value, inner)}" for name, value in pairs[:end]]
    if more := pairs[end:]:
        shown.append(f"… {len(more)} more")
    comma = "," if len(pairs) == 1 and (head, tail) == ("(", ")") else ""
    return f"{head}{', '.join(shown)}{comma}{tail}"


def _entries(node: Any) -> tuple[str, Sequence[tuple[str, Any]], str] | None:
    """Return what stands around a node's entries, and each with its name; `None` for a leaf."""
    fields = getattr(node, "_fields", None)
    if isinstance(node, tuple) and fields is not None:
        named = [(f"{name}=", value) for name, value in zip(fields, node, strict=True)]
        return f"{type(node).__name__}(", named, ")"
    if isinstance(node, tuple | list):
        first, last = ("(", ")") if isinstance(node, tuple) else ("[", "]")
        return first, [("", value) for value in node], last
    if isinstance(node, Mapping):
        name = "" if type(node) is dict else type(node).__name__
        return f"{name}{{", [(f"{key!r}: ", value) for key, value in node.items()], "}"
    if dataclasses.is_dataclass(node) and not isinstance(node, type) and not _is_leaf(node):
        if not jax.tree.leaves(node):
            return f"{type(node).__name__}(", [], ")"
        names = [field.name for field in dataclasses.fields(node) if field.repr]
        return f"{type(node).__name__}(", [(f"{n}=", getattr(node, n)) for n in names], ")"
    return None


def _is_leaf(node: Any) -> bool:
    leaves = jax.tree.leaves(node)
    return len(leaves) == 1 and leaves[0] is node


def _leaf_text(leaf: Any) -> str:
    """Return the value of a scalar that is here, dtype and shape of another array."""
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        if _is_leaf(leaf) or leaf is None:
            return reprlib.repr(leaf)
        return f"{type(leaf).__name__}({len(jax.tree.leaves(leaf))} arrays)"
    kind = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted():
        return f"{kind} (donated)"
    if leaf.shape or not _is_here(leaf):
        return kind
    value = np.asarray(leaf).item()
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def _is_here(scalar: Any) -> bool:
    """Whether this process can read the value of a scalar: no tracer, shape or random key."""
    if isinstance(scalar, jax.core.Tracer | jax.ShapeDtypeStruct):
        return False
    if isinstance(scalar, jax.Array):
        is_key = jax.dtypes.issubdtype(scalar.dtype, jax.dtypes.prng_key)
        return not is_key and (scalar.is_fully_addressable or scalar.is_fully_replicated)
    return isinstance(scalar, np.ndarray | np.generic)


def _itemsize(leaf: Any) -> int:
    return getattr(getattr(leaf, "dtype", None), "itemsize", 0)


def _scaled(number: float, base: int, units: Sequence[str]) -> str:
    """Four significant digits and the largest unit that leaves at least 1."""
    if abs(number) < 1:
        return f"{number:,.4g} {units[0]}"
    # The small term takes care of exact powers, whose logarithm may come out a little low.
    power = min(int(math.log(abs(number), base) + 1e-9), len(units) - 1)
    return f"{number / base**power:,.4g} {units[power]}"
