"""The equations of a region by numbers that are the same inside of a `shard_map`.

There a program has casts, which change only the mesh axes that a type varies over. In `Chunks`
equations are numbered without them, so that a plan made outside is applied inside, and the other
way round.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Set

from jrc._jaxpr import CopyForReader, Program, is_cast, is_variable
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
            return 0, program.given.index(v), axis
        return number[p] + 1, list(program.eqns[p].outvars).index(v), axis

    equations = tuple(number[p] for p in chunks.equations if p in number)
    return _renumbered(chunks, equations, place)


def with_casts(program: Program, chunks: Chunks) -> Chunks:
    """Return a region of which equations are positions in a program, those of casts among them.

    What the region makes is cast inside. What it reads is cast in front of it, slices too: the
    derivative of a cast is a sum over devices.

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

    new = _renumbered(chunks, tuple(steps[k] for k in chunks.equations), place)
    inside = _with_casts_of(program, new.equations)
    cut = [x for each in new.cut for x in _as_it_is_read(program, each, inside)]
    return dataclasses.replace(new, equations=tuple(sorted(inside)), cut=tuple(cut))


def _with_casts_of(program: Program, equations: Iterable[int]) -> set[int]:
    """Some equations, and the casts that they read of what they make."""
    found = set(equations)
    for p, eqn in enumerate(program.eqns):
        if is_cast(eqn):
            (x,) = eqn.invars
            if is_variable(x) and program.producer[x] in found:
                found.add(p)
    for p in sorted(found, reverse=True):
        eqn = program.eqns[p]
        if is_cast(eqn) and found.isdisjoint(program.consumers.get(eqn.outvars[0], ())):
            found.remove(p)
    return found


def _as_it_is_read(program: Program, cut: Place, inside: Set[int]) -> Iterator[Place]:
    """The values that a region reads of one that is cut: itself, or casts of it."""
    p, i, axis = cut
    v = (program.eqns[p - 1].outvars if p else program.given)[i]
    readers = program.consumers.get(v, ())
    if not inside.isdisjoint(readers):
        yield cut
    for c in readers:
        if c < len(program.eqns) and is_cast(program.eqns[c]) and c not in inside:
            yield from _as_it_is_read(program, (c + 1, 0, axis), inside)


def numbered_copies(program: Program, copies: Iterable[CopyForReader]) -> Copies:
    """Return copies whose equations are numbered without casts."""
    number = {p: k for k, p in enumerate(program.steps)}
    return tuple(
        (number[reader], tuple(number[p] for p in chain if p in number), number[like])
        for reader, chain, like in copies
        if reader in number and like in number
    )


def copies_with_casts(program: Program, copies: Copies) -> list[CopyForReader]:
    """Return copies of which equations are positions in a program."""
    steps, found = program.steps, list[CopyForReader]()
    for reader, chain, like in copies:
        copied = {steps[k] for k in chain}
        casts = _with_casts_of(program, [*copied, steps[reader]]) - {steps[reader]}
        found.append((steps[reader], sorted(casts), steps[like]))
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
