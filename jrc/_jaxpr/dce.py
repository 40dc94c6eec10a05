"""A program without what no result needs, inside of loops and calls too.

A compiler drops dead equations at every depth; whoever counts operators must drop them as well.

>>> import jax, jax.numpy as jnp
>>> half = jax.jit(lambda x: (jnp.sin(x), jnp.cos(x)))
>>> program = jax.make_jaxpr(lambda x: half(x)[0])(1.0)
>>> [primitive_name(node.eqn) for node in alive(program)[0].inside[0]]
['sin']
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Var

from jrc._jaxpr.control_flow import loop_parts
from jrc._jaxpr.equations import inner_programs, primitive_name
from jrc._jaxpr.program import acts


@dataclasses.dataclass(frozen=True, eq=False)
class Alive:
    """An equation that some result depends on, and what is alive of the programs inside.

    Attributes:
        eqn: The equation.
        inside: For each program inside, its live equations in order.
    """

    eqn: JaxprEqn
    inside: tuple[tuple["Alive", ...], ...] = ()


def alive(jaxpr: Jaxpr, wanted: Sequence[bool] | None = None) -> tuple[Alive, ...]:
    """The equations that the results, or those of them that are wanted, depend on."""
    return _alive(jaxpr, [True] * len(jaxpr.outvars) if wanted is None else wanted)[0]


def _alive(jaxpr: Jaxpr, wanted: Sequence[bool]) -> tuple[tuple[Alive, ...], list[bool]]:
    """The live equations, and which inputs they read."""
    used = {v for v, want in zip(jaxpr.outvars, wanted, strict=True) if want and _is_var(v)}
    found = []
    for eqn in reversed(jaxpr.eqns):
        outs = [var in used for var in eqn.outvars]
        if not any(outs) and not acts(eqn):
            continue
        inside, reads = _within(eqn, outs)
        found.append(Alive(eqn, inside))
        used.update(v for v, read in zip(eqn.invars, reads, strict=True) if read and _is_var(v))
    return tuple(found[::-1]), [var in used for var in jaxpr.invars]


def _within(
    eqn: JaxprEqn, outs: Sequence[bool]
) -> tuple[tuple[tuple[Alive, ...], ...], Sequence[bool]]:
    programs, name = inner_programs(eqn), primitive_name(eqn)
    if name == "scan":
        return _in_scan(eqn, programs[0], outs)
    if name == "cond":
        parts = [_alive(branch, outs) for branch in programs]
        reads = [any(each) for each in zip(*(part[1] for part in parts), strict=True)]
        return tuple(part[0] for part in parts), [True, *reads]
    if len(programs) == 1 and _corresponds(eqn, programs[0]):
        inside, reads = _alive(programs[0], outs)
        return (inside,), reads
    return tuple(alive(each) for each in programs), [True] * len(eqn.invars)


def _in_scan(
    eqn: JaxprEqn, body: Jaxpr, outs: Sequence[bool]
) -> tuple[tuple[tuple[Alive, ...], ...], Sequence[bool]]:
    """A carry is alive if a later step reads it: until nothing new comes to life."""
    consts, carried = loop_parts(eqn)
    wanted = list(outs)
    while True:
        inside, reads = _alive(body, wanted)
        more = [w or r for w, r in zip(wanted, reads[consts : consts + carried], strict=False)]
        more += wanted[carried:]
        if more == wanted:
            return (inside,), reads
        wanted = more


def _corresponds(eqn: JaxprEqn, inner: Jaxpr) -> bool:
    """Whether inputs and results of the equation are those of the program inside, in order."""
    same_number = len(inner.invars) == len(eqn.invars) and len(inner.outvars) == len(eqn.outvars)
    return same_number and primitive_name(eqn) != "while"


def _is_var(atom: Any) -> bool:
    return isinstance(atom, Var)
