"""Copies of a wide value for readers that cannot read the same slices of it.

A contrastive loss reads one matrix of products along rows and along columns: no region in chunks
holds both. With a product for each, two regions do, and the matrix is never in memory. What is
divided by the mean of a matrix needs all of it first: with a copy it is computed in a second pass.

>>> import jax, jax.numpy as jnp
>>> sums = lambda z: jnp.sum(jnp.max(z, axis=0)) + jnp.sum(jnp.max(z, axis=1))
>>> loss = lambda x, y: sums(x @ y)
>>> program = Program(jax.make_jaxpr(loss)(jnp.ones((64, 2)), jnp.ones((2, 64))))
>>> copies_of_wide(program, narrow=2**10, held=(), readers=Readers.WITH_A_NUMBER_IN_COMMON)
[(3, (0,), 3)]
"""

import enum
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from jrc._jaxpr import (
    INPUT,
    Program,
    facts_of,
    has_effects,
    inner_programs,
    nbytes,
)

Copies = tuple[tuple[int, tuple[int, ...], int], ...]
"""For the position of a reader, the equations whose copies it reads, and the reader that has them
first; see `copy_for_readers`."""


_NUMBER, _FEW_NUMBERS = 16, 256
"""Bytes of a number, and of few numbers, at most."""


class Readers(enum.Enum):
    """Which readers of a wide value have copies of their own.

    Attributes:
        IN_TURN: Those that need few numbers which another makes of all of it.
        WITH_A_NUMBER_IN_COMMON: Those that have nothing but numbers in common, too.
        WITH_NARROW_IN_COMMON: Those that meet in narrow values, too.
        IN_TURN_OF_NARROW: Those that need narrow values which another makes of it, such as sums of
            its columns.
    """

    IN_TURN = enum.auto()
    WITH_A_NUMBER_IN_COMMON = enum.auto()
    WITH_NARROW_IN_COMMON = enum.auto()
    IN_TURN_OF_NARROW = enum.auto()


def copies_of_wide(
    program: Program, narrow: int, held: Collection[int], readers: Readers
) -> list[tuple[int, tuple[int, ...], int]]:
    """Return what is copied for readers of wide values.

    Args:
        program: The program, without `jit` calls.
        narrow: Bytes of the widest value that stays whole.
        held: Equations of regions that were found without copies.
        readers: Which of them have copies of their own.

    Returns:
        What `copy_for_readers` takes.
    """
    copied: dict[tuple[int, int], set[int]] = {}
    for p, is_live in enumerate(program.live()):
        wide = [v for v in program.eqns[p].outvars if nbytes(v.aval) > narrow]
        if not is_live or p in held or len(wide) != 1:
            continue
        (v,) = wide
        groups = _groups(program, program.consumers.get(v, ()), narrow, readers)
        chain = _makers(program, v, narrow) if len(set(groups.values())) > 1 else None
        if chain is not None:
            before, first = None, dict[int, int]()
            for reader, group in sorted(groups.items()):
                like = first.setdefault(group, reader)
                if before not in (None, group):
                    copied.setdefault((reader, like), set()).update(chain)
                before = group
    return [(reader, tuple(sorted(chain)), like) for (reader, like), chain in copied.items()]


def _groups(
    program: Program, readers: Sequence[int], narrow: int, apart: Readers
) -> Mapping[int, int]:
    """The readers of a value, each with a number: that of those which read the same copy."""
    if len(readers) < 2 or len(program.eqns) in readers:
        return {}  # a result of the program is one value
    wide = {reader: _reached(program, [reader], narrow) for reader in readers}
    if apart is Readers.IN_TURN_OF_NARROW:
        return _turns(program, wide, narrow)
    turns = _turns(program, wide, _FEW_NUMBERS)
    if apart is Readers.IN_TURN:
        return turns
    in_common = _NUMBER if apart is Readers.WITH_A_NUMBER_IN_COMMON else narrow
    reached = {reader: _reached(program, [reader], in_common) for reader in readers}
    needing = {reader: _reached(program, [reader], -1) for reader in readers}
    group = {reader: reader for reader in readers}
    for reader in readers:
        for other in readers:
            is_same = other in needing[reader] or not reached[other].isdisjoint(reached[reader])
            if turns[reader] == turns[other] and is_same:
                old, new = group[other], group[reader]
                group = {k: new if g == old else g for k, g in group.items()}
    return group


def _turns(program: Program, wide: Mapping[int, set[int]], few: int) -> dict[int, int]:
    """The readers of a value, each with how many passes over it are needed before.

    Args:
        program: The program.
        wide: For each of them the equations that depend on it through wide values.
        few: Bytes of what one of them makes that another waits for, at most.
    """
    late = {reader: _after_few(program, reader, few) for reader in wide}
    turns = dict.fromkeys(wide, 0)
    for _ in wide:
        for reader, equations in wide.items():
            for other in wide:
                if other != reader and not late[other].isdisjoint(equations):
                    turns[reader] = min(max(turns[reader], turns[other] + 1), len(wide))
    return turns


def _after_few(program: Program, p: int, few: int) -> set[int]:
    """The equations that depend on so few bytes, which are made of what an equation makes."""
    made = (v for q in _reached(program, [p], -1) for v in program.eqns[q].outvars)
    waiting = [program.consumers.get(v, ()) for v in made if nbytes(v.aval) <= few]
    return _reached(program, itertools.chain(*waiting), -1)


def _reached(program: Program, positions: Iterable[int], narrow: int) -> set[int]:
    """The equations that depend on some through values of more than some bytes, these too."""
    found, wanted = set[int](), list(positions)
    while wanted:
        q = wanted.pop()
        if q in found or q >= len(program.eqns):
            continue
        found.add(q)
        for v in program.eqns[q].outvars:
            if nbytes(v.aval) > narrow:
                wanted += program.consumers.get(v, ())
    return found


def _makers(program: Program, v: Any, narrow: int) -> list[int] | None:
    """The equations that make a value from narrow ones; `None` where one must not run twice."""
    found, wanted = set[int](), [v]
    while wanted:
        p = program.producer[wanted.pop()]
        if p == INPUT or p in found:
            continue
        eqn = program.eqns[p]
        if has_effects(eqn) or facts_of(eqn).is_collective or inner_programs(eqn):
            return None
        found.add(p)
        wanted += [x for x in program.reads(p) if nbytes(x.aval) > narrow]
    return sorted(found)
