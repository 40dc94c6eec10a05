"""Regions of a program that are worth running in chunks: narrow, then wide, then narrow again.

A region is grown around a wide value, along an axis that is independent: what makes a wide input of
it and what reads a wide result of it joins it, until only narrow values enter and leave. A region
after which nothing but a sum over the axis follows, such as a loss, takes that sum in.

>>> import jax, jax.numpy as jnp
>>> from jrc._jaxpr import inline_all
>>> loss = lambda w, x: jnp.mean(jax.nn.logsumexp(jnp.tanh(x) @ w, axis=1))
>>> program = Program(inline_all(jax.make_jaxpr(loss)(jnp.ones((4, 500)), jnp.ones((80, 4)))))
>>> (region,) = wide_regions(program, narrow=20_000)
>>> program.eqns[min(region.equations)].primitive.name, region.parts, len(region.results)
('dot_general', 80, 1)
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from jrc._jaxpr import Program, nbytes, shape_of
from jrc.remat._chunks.growth import Growth, NoRegion
from jrc.remat._chunks.growth_limits import Limits, ProgramFacts, anywhere, nowhere
from jrc.remat._chunks.region import Region
from jrc.remat._chunks.turns import waits_for_itself


def wide_regions(
    program: Program,
    narrow: int,
    apart: Iterable[int] = (),
    lies_across: Callable[[Any, int], bool] = nowhere,
    ends: Collection[Any] | None = None,
    perturbed: Collection[Any] | None = None,
    accepts: Callable[[Region], bool] = anywhere,
    conflicts: set[tuple[int, int]] | None = None,
) -> list[Region]:
    """Return regions that share no equation, around every value that is wider than `narrow` bytes.

    Args:
        program: The program, without `jit` calls.
        narrow: Bytes of the widest value that may enter or leave a region.
        apart: Equations that stay outside of all regions; what they read and make may be wide.
        lies_across: Of a value and an axis, whether slices along it would lie across devices.
        ends: The results that are differentiated; by default all.
        perturbed: The inputs that they are differentiated by; by default all.
        accepts: Whether a region may be one of them.
        conflicts: Takes the reads that ended growths, as `Limits.conflicts` has them.
    """
    found: list[Region] = []
    live = program.live()
    wide = [
        (nbytes(v.aval), -p, v)
        for p, eqn in enumerate(program.eqns)
        if live[p]
        for v in eqn.outvars
        if nbytes(v.aval) > narrow
    ]
    facts = ProgramFacts(program, ends, perturbed)
    met = set[tuple[int, int]]() if conflicts is None else conflicts
    limits = Limits(facts, narrow, frozenset(apart), lies_across, accepts, conflicts=met)
    taken = limits.taken
    for _, p, v in sorted(wide, key=lambda each: each[:2], reverse=True):
        if -p not in taken and -p not in limits.apart:
            region = _best_region(limits, v)
            held: list[Region] = []
            if region is None and limits.met:
                region, held = _with_another(limits, v, found)
            if region is None:
                continue
            others = [each for each in found if each not in held]
            if not waits_for_itself(program, region, others):
                found = [*others, region]
                taken.update(region.equations)
    return sorted(found, key=lambda region: region.equations)


def _with_another(
    limits: "Limits", v: Any, found: Sequence[Region]
) -> tuple[Region | None, list[Region]]:
    """The region around a value that holds one which it cannot stand beside, and that one."""
    for each in found:
        if limits.met.isdisjoint(each.equations):
            continue
        region = _best_region(limits.without(each), v, each)
        if region is not None:
            return region, [each]
    return None, []


def region_of_widest(
    program: Program,
    narrow: int,
    lies_across: Callable[[Any, int], bool] = nowhere,
    ends: Collection[Any] | None = None,
    perturbed: Collection[Any] | None = None,
    accepts: Callable[[Region], bool] = anywhere,
) -> Region | None:
    """Return the region around the widest value; `None` if there is none.

    Args:
        program: The program, without `jit` calls.
        narrow: Bytes of the widest value that may enter or leave it.
        lies_across: As for `wide_regions`.
        ends: Likewise.
        perturbed: Likewise.
        accepts: Likewise.
    """
    live = program.live()
    made = [v for p, eqn in enumerate(program.eqns) if live[p] for v in eqn.outvars]
    widest = max(made, key=lambda v: nbytes(v.aval), default=None)
    if widest is None:
        return None
    facts = ProgramFacts(program, ends, perturbed)
    limits = Limits(facts, narrow, frozenset(), lies_across, accepts)
    return _best_region(limits, widest)


def _best_region(limits: Limits, v: Any, start: Region | None = None) -> Region | None:
    """The region around a value along the axis that leaves the fewest bytes; with another in it."""
    limits.met.clear()
    limits.met_wide_sum = False
    regions = _regions_around(limits, v, start)
    if not regions and limits.met_wide_sum:
        regions = _regions_around(limits.with_wide_sums, v, start)
    return min(regions, key=lambda each: each.edge + each.bytes / each.parts, default=None)


def _regions_around(limits: Limits, v: Any, start: Region | None) -> list[Region]:
    """The regions around a value, one an axis at most."""
    regions = []
    for axis, length in enumerate(shape_of(v)):
        if length > 1 and not limits.lies_across(v, axis):
            try:
                growth = Growth(limits, v, axis, start)
            except NoRegion:
                continue
            with contextlib.suppress(NoRegion):
                regions.append(growth.region())
    return list(filter(limits.accepts, regions))
