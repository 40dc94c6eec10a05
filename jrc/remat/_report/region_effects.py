"""Regions that are recomputed although that frees no memory.

A region frees the values that it recomputes between the forward pass and its own backward pass. It
frees nothing of the peak if these values, had they been saved, would fit beside all other live
values at every equation of the backward pass.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from jrc._jaxpr import (
    LiveEquation,
    Scope,
    facts_of,
    inner_programs,
    is_variable,
    nbytes,
    scope_of,
)
from jrc.remat._region.rerun_scope import is_planned
from jrc.remat._report.rerun_regions import RerunRegion, place_text

_NEEDLESS = "the derivative needs nothing that is made inside. Leave out the wrap."


def needless_regions(forward: Any, regions: Sequence[RerunRegion], name: str) -> Iterator[str]:
    """Yield a warning for each region that the derivative needs nothing of."""
    rerun = {each.place for each in regions}
    for where in dict.fromkeys(place_text(eqn, name) for eqn in _outermost(forward)):
        if where not in rerun:
            yield f"the region {where} frees nothing: {_NEEDLESS}"


def useless_regions(
    regions: Sequence[RerunRegion], gradient: Any, program: Sequence[LiveEquation]
) -> Iterator[str]:
    """Yield a warning for regions whose values could all be saved without a higher peak."""
    useless = [*_savable(regions, gradient, program), *(r for r in regions if not r.bytes)]
    for where in sorted({each.place for each in useless}):
        # The backward pass reaches the last one first.
        here = [each for each in regions if each.place == where][::-1]
        found = [i for i, each in enumerate(here) if each in useless]
        which = _which(found, len(here))
        frees = f"{which} {where} {'frees' if len(found) == 1 else 'free'} nothing"
        if not any(here[i].bytes for i in found):
            yield f"{frees}: {_NEEDLESS}"
        elif len(regions) == 1:
            yield (
                f"{frees}: it is recomputed in one piece, which then needs all the memory that "
                "was saved. Cut it into several regions, as "
                "jrc.recompute_segments(fn, ['block_0', ...]) does at marks."
            )
        else:
            yield (
                f"{frees} of the peak: the backward pass needs as much elsewhere. Save what is in "
                "there (no_recompute_segments=... of jrc.recompute_segments), so that it is not "
                "recomputed."
            )


def _outermost(forward: Any) -> Iterator[Any]:
    """Yield the regions of the function that are inside of no other one."""
    for eqn in forward.eqns:
        if is_planned(eqn):
            continue
        if facts_of(eqn).is_region:
            yield eqn
        else:
            for inner in inner_programs(eqn):
                yield from _outermost(inner)


def _which(found: Sequence[int], total: int) -> str:
    """Return which of the regions of one line are meant, counted from 0 in program order."""
    if total == 1:
        return "the region"
    numbers = ", ".join(map(str, found))
    return f"{'region' if len(found) == 1 else 'regions'} {numbers} of {total} (from 0)"


def _savable(
    regions: Sequence[RerunRegion], gradient: Any, program: Sequence[LiveEquation]
) -> list[RerunRegion]:
    """Return as many regions as can be saved together without a higher peak."""
    at = {each.at: each for each in regions if each.at is not None}
    levels = _forward_levels(gradient, program)
    need = [level + (at[i].bytes if i in at else 0) for i, level in enumerate(levels)]
    highest, found = max(need, default=0), []
    # Values of the region that is differentiated first would be saved for the shortest time.
    for i in sorted(at):
        more = [n + at[i].bytes * (j < i) for j, n in enumerate(need)]
        if at[i].bytes and max(more) <= highest:
            need, found = more, [*found, at[i]]
    return found


def _forward_levels(gradient: Any, program: Sequence[LiveEquation]) -> list[int]:
    """Return the live bytes of the forward pass's values at each equation of the backward pass."""
    scope = Scope(gradient)
    made: dict[Any, int] = {}
    last: dict[Any, int] = {}
    backward = [("transpose(" in scope_of(node.eqn)) for node in program]
    for i, node in enumerate(program):
        for var in filter(is_variable, node.eqn.invars):
            last[scope.unviewed(var)] = i
        if not backward[i]:
            made |= {v: i for v in node.eqn.outvars if scope.unviewed(v) is v}
    changes = [0] * (len(program) + 1)
    for var, start in made.items():
        if var in last:
            changes[start] += nbytes(var.aval)
            changes[last[var] + 1] -= nbytes(var.aval)
    levels, level = [], 0
    for i, is_backward in enumerate(backward):
        level += changes[i]
        levels.append(level if is_backward else 0)
    return levels
