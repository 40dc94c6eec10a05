"""Copies of a wide value for readers that want it in slices along different axes.

A contrastive loss reads one matrix of products along rows and along columns: no region in chunks
holds both. With a product for each, two regions do, and the matrix is never in memory.

>>> import jax, jax.numpy as jnp
>>> sums = lambda z: jnp.sum(jnp.max(z, axis=0)) + jnp.sum(jnp.max(z, axis=1))
>>> loss = lambda x, y: sums(x @ y)
>>> program = Program(jax.make_jaxpr(loss)(jnp.ones((64, 2)), jnp.ones((2, 64))))
>>> copies_of_wide(program, narrow=2**10, held=())
{3: [0]}
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jrc._jaxpr import INPUT, Program, facts_of, has_effects, inner_programs, nbytes

Copies = tuple[tuple[int, tuple[int, ...]], ...]
"""For the position of a reader, the equations that are copied in front of it."""


_NUMBER = 16
"""Bytes of a number, at most."""


def copies_of_wide(
    program: Program, narrow: int, held: Collection[int], apart: bool = False
) -> Mapping[int, Sequence[int]]:
    """Return what is copied for readers of wide values that have nothing else in common.

    Args:
        program: The program, without `jit` calls.
        narrow: Bytes of the widest value that stays whole.
        held: Equations of regions that were found without copies.
        apart: Whether readers that meet in narrow values have copies of their own too.

    Returns:
        For each reader the equations that make its copy, in program order.
    """
    copied: dict[int, list[int]] = {}
    for p, is_live in enumerate(program.live()):
        wide = [v for v in program.eqns[p].outvars if nbytes(v.aval) > narrow]
        if not is_live or p in held or len(wide) != 1:
            continue
        (v,) = wide
        groups = _groups(program, program.consumers.get(v, ()), narrow if apart else _NUMBER)
        chain = _makers(program, v, narrow) if len(set(groups.values())) > 1 else None
        if chain is not None:
            before = None
            for reader, group in sorted(groups.items()):
                if before not in (None, group):
                    copied.setdefault(reader, []).extend(chain)
                before = group
    return {reader: sorted(set(chain)) for reader, chain in copied.items()}


def _groups(program: Program, readers: Sequence[int], narrow: int) -> dict[int, int]:
    """The readers of a value, each with a number.

    It is the same where one needs another, or where they make a value of more bytes together.
    """
    if len(program.eqns) in readers:
        return {}  # a result of the program is one value
    group = {reader: reader for reader in readers}
    wide = {reader: _reached(program, reader, narrow) for reader in readers}
    for reader in readers:
        needing = _reached(program, reader, -1)
        for other in readers:
            if other in needing or not wide[other].isdisjoint(wide[reader]):
                old, new = group[other], group[reader]
                group = {k: new if g == old else g for k, g in group.items()}
    return group


def _reached(program: Program, p: int, narrow: int) -> set[int]:
    """The equations that depend on one through values of more than some bytes, itself too."""
    found, wanted = set[int](), [p]
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
