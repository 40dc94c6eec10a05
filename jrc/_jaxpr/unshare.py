"""Cheap values that many equations read: readers that stand apart get a copy of their own.

A causal mask, rotary tables or positions are made once and read by every block. A region ends only
where no recomputed value is live, so that one such value would join all blocks into one region.
With a copy in each block it is recomputed there, at next to no cost. In the forward pass XLA merges
equal copies again.

Copied is what XLA computes in an elementwise pass, or only moves, and what is made of constants and
of inputs without a derivative (integers, booleans) alone.

>>> import jax, jax.numpy as jnp
>>> def blocks(x):
...     mask = jnp.arange(3) > 1
...     for _ in range(40):
...         x = jnp.where(mask, x @ x, 0)
...     return x
>>> from jrc._jaxpr.inline import inline_all
>>> program = Program(inline_all(jax.make_jaxpr(blocks)(jnp.ones((3, 3))).jaxpr))
>>> count = lambda program: sum(eqn.primitive.name == "iota" for eqn in program.eqns)
>>> count(program), count(unshared(program)) > 2
(1, True)
"""

from typing import Any

from jrc._jaxpr.copy_for_readers import copy_for_readers
from jrc._jaxpr.cost import equation_flops
from jrc._jaxpr.equations import has_effects, inner_programs
from jrc._jaxpr.primitives import Fusion, View, facts_of
from jrc._jaxpr.program import INPUT, Program
from jrc._tree import is_floating, is_typed_key

_COPY_DISTANCE = 24
"""A value is copied for a reader that stands more than this many equations behind the last copy."""
_COPIED_FLOPS = 0.02
"""Copies may cost at most this share of the FLOPs of a program."""


def unshared(program: Program) -> Program:
    """Return the program in which readers of a cheap value that stand apart read a copy."""
    cheap = _cheap_equations(program)
    copied = _copies(program, cheap)
    added = sum(equation_flops(program.eqns[p]) for each in copied.values() for p in each)
    total = sum(map(equation_flops, program.eqns))
    if not copied or added > _COPIED_FLOPS * max(total, 1):
        return program
    return copy_for_readers(program, [(i, chain, i) for i, chain in copied.items()])


def _cheap_equations(program: Program) -> set[int]:
    """The equations that may be copied."""
    cheap: set[int] = set()
    for p, eqn in enumerate(program.eqns):
        makers = ((program.producer[v], v) for v in program.reads(p))
        if _is_cheap(eqn) and all(
            q in cheap or (q == INPUT and not is_floating(v.aval) and not is_typed_key(v))
            for q, v in makers
        ):
            cheap.add(p)
    return cheap


def _is_cheap(eqn: Any) -> bool:
    facts = facts_of(eqn)
    if inner_programs(eqn) or has_effects(eqn) or facts.is_collective or not eqn.outvars:
        return False
    # A mark has one value; a copy of it would be a second one of the same name.
    if facts.view in (View.NAME, View.ANNOTATION) and not facts.is_cast:
        return False
    if any(is_typed_key(v.aval) for v in (*eqn.outvars, *eqn.invars) if hasattr(v, "aval")):
        return False
    return facts.fusion is not Fusion.NONE or facts.moves_data


def _copies(program: Program, cheap: set[int]) -> dict[int, list[int]]:
    """For each reader, the cheap equations that are copied for it."""
    live = program.live()
    copied: dict[int, list[int]] = {}
    last_use: dict[int, int] = {}
    place = 0
    for i in range(len(program.eqns)):
        if not live[i] or i in cheap:
            continue
        place += 1
        chain = _cheap_makers(program, i, cheap)
        # Copied together with what it is made of, or else that would be shared.
        far = {p for p in chain if p in last_use and place - last_use[p] > _COPY_DISTANCE}
        if far:
            copied[i] = sorted(far | (chain & set(last_use)))
        for p in chain:
            if far or p not in last_use:
                last_use[p] = place
    return copied


def _cheap_makers(program: Program, i: int, cheap: set[int]) -> set[int]:
    """The cheap equations that an equation depends on through cheap ones."""
    found: set[int] = set()
    wanted = [i]
    while wanted:
        makers = {program.producer[v] for v in program.reads(wanted.pop())} & cheap
        wanted += makers - found
        found |= makers
    return found
