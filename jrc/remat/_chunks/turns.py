"""Regions of a program that run one after the other."""

from collections.abc import Mapping, Sequence

from jrc._jaxpr import INPUT, Program
from jrc.remat._chunks.region import Region


def waits_for_itself(program: Program, region: Region, others: Sequence[Region]) -> bool:
    """Return whether a region needs what it makes, through equations outside or other regions.

    Args:
        program: The program.
        region: The region.
        others: Other regions, of which none waits for itself.
    """
    first = region.equations[0]  # the first equation that may need the region
    for other in sorted(others, key=lambda each: each.equations[-1], reverse=True):
        if other.equations[-1] > first:
            first = min(first, other.equations[0])
    owner: Mapping[int, Region] = {p: each for each in (*others, region) for p in each.equations}
    wanted, seen = list(region.slices.read), set[int]()
    while wanted:
        p = program.producer[wanted.pop()]
        if p == INPUT or p < first or p in seen:
            continue
        around = owner.get(p)
        if around is region:
            return True
        seen.update(around.equations if around else [p])
        wanted += around.slices.read if around else program.reads(p)
    return False
