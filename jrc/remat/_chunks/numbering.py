"""The equations of a region by numbers that are the same inside of a `shard_map`.

There a program has casts, which change only the mesh axes that a type varies over. In `Chunks`
equations are numbered without them, so that a plan made outside is applied inside, and the other
way round.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jrc._jaxpr import Program, is_cast, is_variable
from jrc.remat._chunks.chunks import Chunks, Place
from jrc.remat._chunks.copies import Copies


def without_casts(program: Program, chunks: Chunks) -> Chunks:
    """Return a region whose equations are numbered without casts.

    Args:
        program: The program.
        chunks: The region, of which equations are positions in the program; not in `copies`.
    """
    if len(program.steps) == len(program.eqns):
        return chunks
    number = {p: k for k, p in enumerate(program.steps)}

    def place(p: int, i: int, axis: int) -> Place:
        if p == 0:
            return p, i, axis
        v = program.source(program.eqns[p - 1].outvars[i])
        p = program.producer[v]
        if p < 0:
            return 0, list(program.jaxpr.invars).index(v), axis
        return number[p] + 1, list(program.eqns[p].outvars).index(v), axis

    equations = tuple(number[p] for p in chunks.equations if p in number)
    return _renumbered(chunks, equations, place)


def with_casts(program: Program, chunks: Chunks) -> Chunks:
    """Return a region of which equations are positions in a program, those of casts among them.

    What is cast of slices is cast in the region. A weight is cast in front of it: the derivative of
    a cast is a sum over devices.

    Args:
        program: The program.
        chunks: The region, of which equations are numbered without casts; not in `copies`.

    Raises:
        IndexError: If the program has no such equations.
    """
    if len(program.steps) == len(program.eqns):
        return chunks
    steps = program.steps

    def place(p: int, i: int, axis: int) -> Place:
        return (steps[p - 1] + 1 if p else 0), i, axis

    inside = {steps[k] for k in chunks.equations}
    cut = [place(*each) for each in chunks.cut]
    sliced = {(program.eqns[p - 1].outvars if p else program.jaxpr.invars)[i] for p, i, _ in cut}
    for p, eqn in enumerate(program.eqns):
        if is_cast(eqn):
            (x,) = eqn.invars
            if is_variable(x) and (x in sliced or program.producer[x] in inside):
                inside.add(p)
    return _renumbered(chunks, tuple(sorted(_read(program, inside))), place)


def _read(program: Program, inside: set[int]) -> set[int]:
    """The equations, without casts that none of them reads."""
    found = set(inside)
    for p in sorted(inside, reverse=True):
        eqn = program.eqns[p]
        if is_cast(eqn) and found.isdisjoint(program.consumers.get(eqn.outvars[0], ())):
            found.remove(p)
    return found


def numbered_copies(program: Program, copies: Mapping[int, Any]) -> Copies:
    """Return copies whose equations are numbered without casts."""
    number = {p: k for k, p in enumerate(program.steps)}
    return tuple(
        (number[reader], tuple(number[p] for p in chain if p in number))
        for reader, chain in copies.items()
        if reader in number
    )


def copies_with_casts(program: Program, copies: Copies) -> dict[int, list[int]]:
    """Return copies of which equations are positions in a program."""
    steps, found = program.steps, {}
    for reader, chain in copies:
        copied = {steps[k] for k in chain}
        for p, eqn in enumerate(program.eqns):
            if is_cast(eqn) and not copied.isdisjoint(
                program.producer[x] for x in eqn.invars if is_variable(x)
            ):
                copied.add(p)
        found[steps[reader]] = sorted(copied)
    return found


def _renumbered(
    chunks: Chunks, equations: tuple[int, ...], place: Callable[[int, int, int], Place]
) -> Chunks:
    shards = tuple(
        dataclasses.replace(
            each,
            cut=tuple(place(*x) for x in each.cut),
            split=tuple(dataclasses.replace(x, place=place(*x.place)) for x in each.split),
        )
        for each in chunks.shards
    )
    cut = tuple(place(*each) for each in chunks.cut)
    return dataclasses.replace(chunks, equations=equations, cut=cut, shards=shards)
