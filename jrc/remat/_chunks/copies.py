"""Copies of a wide value for readers that cannot read the same slices of it.

A contrastive loss reads one matrix of products along rows and along columns: no region in chunks
holds both. With a product for each, two regions do, and the matrix is never in memory. What is
divided by the mean of a matrix needs all of it first: with a copy it is computed in a second pass.

>>> import jax, jax.numpy as jnp
>>> sums = lambda z: jnp.sum(jnp.max(z, axis=0)) + jnp.sum(jnp.max(z, axis=1))
>>> loss = lambda x, y: sums(x @ y)
>>> program = Program(jax.make_jaxpr(loss)(jnp.ones((64, 2)), jnp.ones((2, 64))))
>>> copies_of_wide(program, narrow=2**10, held=(), groups=by_pass_and_axis)
[(3, (0,), 3)]
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from jrc._jaxpr import (
    INPUT,
    IndependentAxis,
    Program,
    facts_of,
    has_effects,
    independent_axes,
    inner_programs,
    is_variable,
    nbytes,
    shape_of,
)

Copies = tuple[tuple[int, tuple[int, ...], int], ...]
"""For the position of a reader, the equations whose copies it reads, and the reader that has them
first; see `copy_for_readers`."""

_NUMBER = 16
"""Bytes of a number, at most."""

_MOST_COPIED = 4
"""Copied equations over those of the program, at most. If each layer had copies of all layers
before it, the search for regions would take minutes, and the program would be far too slow."""


def copies_of_wide(
    program: Program, narrow: int, held: Collection[int], groups: "Groups"
) -> list[tuple[int, tuple[int, ...], int]]:
    """Return what is copied for readers of wide values.

    Args:
        program: The program, without `jit` calls.
        narrow: Bytes of the widest value that stays whole.
        held: Equations of regions that were found without copies.
        groups: Which readers of a value read the same copy.

    Returns:
        What `copy_for_readers` takes; nothing where that has many times the equations.
    """
    copied: dict[tuple[int, int], set[int]] = {}
    uses = _Uses(program)
    for p in reversed(range(len(program.eqns))):
        wide = [v for v in program.eqns[p].outvars if nbytes(v.aval) > narrow]
        if not program.live()[p] or p in held or len(wide) != 1:
            continue
        (v,) = wide
        readers = uses.of(v)
        if len(readers) < 2 or len(program.eqns) in readers:
            continue  # a result of the program is one value
        group_of = groups(uses, v, readers, narrow)
        chain = _makers(program, v, narrow) if len(set(group_of.values())) > 1 else None
        if chain is not None:
            before, first = None, dict[Any, int]()
            for reader, group in sorted(group_of.items()):
                like = first.setdefault(group, reader)
                if before not in (None, group):
                    copied.setdefault((reader, like), set()).update(chain)
                    uses.of_copies.add((v, reader))
                before = group
    added = sum(len(chain) for (reader, like), chain in copied.items() if reader == like)
    if added > _MOST_COPIED * len(program.eqns):
        return []
    return [(reader, tuple(sorted(chain)), like) for (reader, like), chain in copied.items()]


class _Uses:
    """Which equations read the values of a program, and not copies of them.

    Attributes:
        program: The program.
        of_copies: The values of which there are copies, each with an equation that reads one.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.of_copies = set[tuple[Any, int]]()

    def of(self, v: Any) -> list[int]:
        """Return the equations that read a value itself."""
        readers = self.program.consumers.get(v, ())
        return [reader for reader in readers if (v, reader) not in self.of_copies]


Groups = Callable[["_Uses", Any, Sequence[int], int], Mapping[int, Any]]
"""The readers of a value, each with what those have in common that read the same copy."""


def by_pass_and_axis(
    uses: _Uses, v: Any, readers: Sequence[int], narrow: int
) -> dict[int, tuple[int, int]]:
    """Return how many passes over a value readers need before, and a number for a common axis.

    Args:
        uses: Which equations read which values.
        v: The value.
        readers: Its readers.
        narrow: Bytes of the widest value that stays whole.
    """
    axes = range(len(shape_of(v)))
    common: list[tuple[int, set[int]]] = []
    found = dict[int, tuple[int, int]]()
    for reader, turn in sorted(_turns(uses, readers, narrow).items()):
        along = {axis for axis in axes if _reads_slices(uses, v, axis, reader, narrow)}
        for place, (other, theirs) in enumerate(common):
            if other == turn and (theirs & along or theirs == along):
                common[place] = turn, theirs & along
                break
        else:
            place = len(common)
            common.append((turn, along))
        found[reader] = turn, place
    return found


def by_more_than_a_number(
    uses: _Uses, v: Any, readers: Sequence[int], narrow: int
) -> dict[int, int]:
    """Return which readers need each other, or meet in more than a number: such as terms of a loss.

    Args:
        uses: Which equations read which values.
        v: The value.
        readers: Its readers.
        narrow: Bytes of the widest value that stays whole.
    """
    reached = {reader: _reached(uses, [reader], _NUMBER) for reader in readers}
    needing = {reader: _reached(uses, [reader], -1) for reader in readers}
    group = {reader: reader for reader in readers}
    for reader, other in itertools.product(readers, readers):
        if other in needing[reader] or not reached[other].isdisjoint(reached[reader]):
            old, new = group[other], group[reader]
            group = {k: new if g == old else g for k, g in group.items()}
    return group


def _reads_slices(uses: _Uses, v: Any, axis: int, reader: int, narrow: int) -> bool:
    """Whether slices of a value along an axis give an equation what it needs, and those after it.

    What they make of a slice is one, or is summed. Where it is narrow, others may read it whole.
    """
    program, axes, wanted = uses.program, {v: axis}, [reader]
    while wanted:
        p = wanted.pop()
        if p >= len(program.eqns):
            return False
        eqn = program.eqns[p]
        along = [axes.get(x) if is_variable(x) else None for x in eqn.invars]
        rule = next((each for each in independent_axes(eqn) if _agrees(each, along)), None)
        if rule is None:
            return False
        for w, at in zip(eqn.outvars, rule.results, strict=True):
            if nbytes(w.aval) <= narrow:
                continue
            if rule.is_summed or at is None or axes.setdefault(w, at) != at:
                return False
            wanted += uses.of(w)
    return True


def _agrees(rule: IndependentAxis, along: Sequence[int | None]) -> bool:
    """Whether an equation reads slices of its operands along these axes."""
    return all(at is None or at == each for each, at in zip(rule.operands, along, strict=True))


def _turns(uses: _Uses, readers: Sequence[int], narrow: int) -> dict[int, int]:
    """The readers of a value, each with how many passes over it are needed before.

    One is needed where it meets, in wide values, what is made of a narrow result of another.
    """
    wide = {reader: _reached(uses, [reader], narrow) for reader in readers}
    late = {reader: _after_narrow(uses, reader, narrow) for reader in readers}
    turns = dict.fromkeys(readers, 0)
    for _ in readers:
        for reader, equations in wide.items():
            for other in readers:
                if other != reader and not late[other].isdisjoint(equations):
                    turns[reader] = min(max(turns[reader], turns[other] + 1), len(readers))
    return turns


def _after_narrow(uses: _Uses, p: int, narrow: int) -> set[int]:
    """The equations that depend on narrow values which are made of what an equation makes."""
    made = (v for q in _reached(uses, [p], -1) for v in uses.program.eqns[q].outvars)
    waiting = [uses.of(v) for v in made if nbytes(v.aval) <= narrow]
    return _reached(uses, itertools.chain(*waiting), -1)


def _reached(uses: _Uses, positions: Iterable[int], narrow: int) -> set[int]:
    """The equations that depend on some through values of more than some bytes, these too."""
    found, wanted = set[int](), list(positions)
    while wanted:
        q = wanted.pop()
        if q in found or q >= len(uses.program.eqns):
            continue
        found.add(q)
        for v in uses.program.eqns[q].outvars:
            if nbytes(v.aval) > narrow:
                wanted += uses.of(v)
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
