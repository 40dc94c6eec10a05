"""A region of a program, or of a program inside of it, and the chunks that it may run in."""

import dataclasses
import math

from jrc._jaxpr import Program, is_convolution, nbytes
from jrc.remat._chunks.chunks import Chunks, Form
from jrc.remat._chunks.chunks_of_region import chunks_of
from jrc.remat._chunks.counts import chunk_count
from jrc.remat._chunks.in_shards import PartsOf
from jrc.remat._chunks.region import Region

_LARGE = 2**24
"""Bytes of a chunk that keep a device busy."""


@dataclasses.dataclass(frozen=True, eq=False)
class RegionInside:
    """A region of a program, or of the body of a loop in it.

    Attributes:
        program: The program that it is of.
        region: The region.
        path: The loops around it, or a `shard_map`, each as the number of its equation.
        devices: Over how many devices the program's values are split: one inside of a `shard_map`.
        parts: How devices split it, the outermost first.
        slices: Into how many slices each part may be cut at most.
        forms: The forms of the program and of those around it, the outermost first.
    """

    program: Program
    region: Region
    path: tuple[int, ...]
    devices: int
    parts: tuple[PartsOf, ...]
    slices: int
    forms: tuple[Form, ...] = ()

    def chunks(self, most_bytes: int, most_in_turn: int = 0) -> Chunks | None:
        """Return the region in chunks of about so many bytes; `None` where it needs no more.

        Args:
            most_bytes: Bytes of a chunk, on one device.
            most_in_turn: If it convolves, at most so many chunks are in no loop.
        """
        # Each chunk reads all of what it reads whole, which should be less than what it makes.
        devices = math.prod(each.parts for each in self.parts)
        whole = devices * sum(nbytes(v.aval) for v in self.region.slices.whole)
        most = self.region.bytes / max(whole, _LARGE * devices)
        size = self.region.bytes / (most_bytes * self.devices)
        count = chunk_count(self.slices, size, most, most_in_turn if self.may_be_in_turn else 0)
        return self.in_so_many(count, most_in_turn) if count > 1 else None

    def in_so_many(self, count: int, most_in_turn: int) -> Chunks:
        """Return the region in so many chunks.

        Args:
            count: How many.
            most_in_turn: As for `chunks`.
        """
        chunks = chunks_of(self.program, self.region, count, self.path, self.parts)
        in_turn = count <= most_in_turn and self.may_be_in_turn
        return dataclasses.replace(chunks, forms=self.forms, are_in_turn=in_turn)

    @property
    def may_be_in_turn(self) -> bool:
        """Whether chunks may be in no loop: it convolves, and there is no loop around it."""
        eqns = (self.program.eqns[p] for p in self.region.equations)
        return not self.path and any(map(is_convolution, eqns))
