"""A region of a program that runs in chunks: which, how many, and where devices split it."""

import dataclasses
from collections.abc import Sequence

from jrc._text import Grid, memory_text
from jrc.remat._chunks.copies import Copies

Place = tuple[int, int, int]
"""A value that enters a region, and an axis of it: the number of the equation that makes it from 1
on (0 is the program's inputs, then its constants), which of its results, and the axis."""


@dataclasses.dataclass(frozen=True)
class SplitAxis:
    """An axis of a value that enters a region and is no data: a weight.

    Attributes:
        place: The value and its axis.
        names: The mesh axes that it is split over.
    """

    place: Place
    names: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Shards:
    """The parts of a region that devices compute by themselves: chunks are slices of each.

    Attributes:
        names: The mesh axes that split the region.
        parts: Into how many parts.
        cut: The values that enter in parts, each with its axis.
        split: How values that enter whole are split over other mesh axes.
    """

    names: tuple[str, ...]
    parts: int
    cut: tuple[Place, ...]
    split: tuple[SplitAxis, ...] = ()


@dataclasses.dataclass(frozen=True)
class Form:
    """What is special about the form of a program.

    Attributes:
        in_steps: The reductions that are made in two steps, by the numbers of their equations.
        copies: For readers of wide values, the equations of the program that are copied for them.
        apart: The equations, with copies, that read an operand as a value of its own, each with
            the number of the operand.
    """

    in_steps: tuple[int, ...] = ()
    copies: Copies = ()
    apart: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Chunks:
    """A region of a program that runs in chunks.

    Attributes:
        path: The loops around it, or a `shard_map`, each as the number of its equation.
        equations: The equations of the region, by number: casts, which there are only inside of a
            `shard_map`, are not counted.
        cut: The values that enter in slices, each with its axis.
        chunks: How many chunks.
        shape: The shape of its widest value.
        dtype: Its type.
        name: What makes it, as a label.
        bytes: Its bytes.
        loss: Where the region is the whole loss, and a plan is one of each chunk: which of the
            region's results is differentiated; else `None`.
        shards: How devices split the region; the outermost first.
        forms: The forms of the program and of those inside of it along the path, down to that
            which the region is of; of all regions of a program the same.
        are_in_turn: Whether chunks follow each other in the program, and there is no loop.
    """

    path: tuple[int, ...]
    equations: tuple[int, ...]
    cut: tuple[Place, ...]
    chunks: int
    shape: tuple[int, ...]
    dtype: str
    name: str
    bytes: int
    loss: int | None = None
    shards: tuple[Shards, ...] = ()
    forms: tuple[Form, ...] = ()
    are_in_turn: bool = False

    @property
    def form(self) -> Form:
        """The form of the outermost program."""
        return self.forms[0] if self.forms else Form()

    def inside(self) -> "Chunks":
        """Return the region as one of the program inside of the outermost one."""
        return dataclasses.replace(self, path=self.path[1:], forms=self.forms[1:])

    @property
    def is_whole_loss(self) -> bool:
        """Whether a plan is one of each chunk."""
        return self.loss is not None


def chunks_text(chunks: Sequence[Chunks]) -> str:
    """Return what runs in how many chunks: some regions, or the whole loss, which comes first.

    >>> chunks_text([Chunks((), (0,), (), 8, (), "float32", "", 8)])
    '1 region in 8 chunks'
    """
    if any(each.is_whole_loss for each in chunks):
        loss, *inside = chunks
        regions = f", {_regions_text(len(inside))} inside of each in chunks" if inside else ""
        return f"the whole loss in {loss.chunks} chunks{regions}"
    counts = sorted({each.chunks for each in chunks})
    ends = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    return f"{_regions_text(len(chunks))} in {ends} chunks"


def _regions_text(count: int) -> str:
    return "1 region" if count == 1 else f"{count} regions"


def chunks_table(chunks: Sequence[Chunks]) -> Grid:
    """Return a table of regions in chunks, with the widest value of each."""
    rows = [
        (each.name, memory_text(each.bytes), str(each.chunks), "inside" if each.path else "")
        for each in chunks
    ]
    return Grid(("in chunks", "whole", "chunks", ""), rows)
