"""A region of a program as chunks, which name its equations and values by numbers."""

from collections.abc import Sequence
from typing import Any

from jrc._jaxpr import INPUT, Program, label, nbytes, shape_of
from jrc.remat._chunks.chunks import Chunks, Shards, SplitAxis
from jrc.remat._chunks.in_shards import PartsOf, region_alone
from jrc.remat._chunks.numbering import without_casts
from jrc.remat._chunks.region import Region


def chunks_of(
    program: Program,
    region: Region,
    count: int,
    path: tuple[int, ...],
    parts: Sequence[PartsOf] = (),
) -> Chunks:
    """Return a region of a program in so many chunks.

    Args:
        program: The program.
        region: The region.
        count: How many chunks, see `sizes`.
        path: The loops around the program.
        parts: How devices split it.
    """
    wide: Any = region.wide
    inputs = region_alone(region.slices, region.results)[0].jaxpr.invars
    shards = tuple(
        Shards(
            each.names,
            each.parts,
            tuple((*_place(program, inputs[i]), at) for i, at in each.axes.items()),
            tuple(
                SplitAxis((*_place(program, inputs[i]), at), names)
                for i, split in each.split.items()
                for at, names in enumerate(split)
                if names and not path  # in a loop XLA would exchange what it carries
            ),
        )
        for each in parts
    )
    chunks = Chunks(
        path,
        region.equations,
        tuple((*_place(program, v), axis) for v, axis in region.inputs.items()),
        count,
        shape_of(wide),
        str(wide.aval.dtype),
        label(program.eqns[program.producer[wide]]),
        nbytes(wide.aval),
        shards=shards,
    )
    return without_casts(program, chunks)


def _place(program: Program, v: Any) -> tuple[int, int]:
    p = program.producer[v]
    made = program.given if p == INPUT else program.eqns[p].outvars
    return p + 1, list(made).index(v)
