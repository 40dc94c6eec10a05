"""Dead-code elimination: the equations that some result, or an effect, depends on.

A compiler drops dead equations at every depth; a count of operators must drop them as well.

>>> import jax, jax.numpy as jnp
>>> half = jax.jit(lambda x: (jnp.sin(x), jnp.cos(x)))
>>> program = jax.make_jaxpr(lambda x: half(x)[0])(1.0)
>>> [node.eqn.primitive.name for node in live_equations(program)[0].inside[0]]
['sin']
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Var

from jrc._jaxpr.atoms import variables
from jrc._jaxpr.control_flow import loop_parts
from jrc._jaxpr.equations import branch_outside_kernels, has_effects, inner_programs
from jrc._jaxpr.primitives import primitive_name


def live_positions(
    eqns: Sequence[JaxprEqn],
    outvars: Iterable[Any],
    reads: Callable[[int], Iterable[Any]] | None = None,
    keep_effects: bool = True,
) -> tuple[list[int], set[Var]]:
    """Return the positions of live equations in order, and the variables that are read.

    Args:
        eqns: Equations in program order.
        outvars: The atoms that must be computed.
        reads: From the position of a live equation, the atoms that it reads; by default all its
            operands.
        keep_effects: Whether an equation with an effect (`jax.debug.print`) is always live.
    """
    used = set(variables(outvars))
    live = []
    for i in range(len(eqns) - 1, -1, -1):
        eqn = eqns[i]
        if (keep_effects and has_effects(eqn)) or not used.isdisjoint(eqn.outvars):
            live.append(i)
            used.update(variables(eqn.invars if reads is None else reads(i)))
    return live[::-1], used


@dataclasses.dataclass(frozen=True, eq=False)
class LiveEquation:
    """A live equation, and the live part of the programs inside of it.

    Attributes:
        eqn: The equation.
        inside: For each program inside, its live equations in order.
    """

    eqn: JaxprEqn
    inside: tuple[tuple["LiveEquation", ...], ...] = ()


def live_equations(jaxpr: Jaxpr) -> tuple[LiveEquation, ...]:
    """Return the equations that the results depend on, dead code inside of them dropped too."""
    return _live(jaxpr, [True] * len(jaxpr.outvars))[0]


Inside = tuple[tuple[LiveEquation, ...], ...]


def _live(jaxpr: Jaxpr, wanted: Sequence[bool]) -> tuple[tuple[LiveEquation, ...], list[bool]]:
    """Return the live equations for the wanted results, and which inputs they read."""
    outvars = [v for v, want in zip(jaxpr.outvars, wanted, strict=True) if want]
    inside: dict[int, Inside] = {}
    used = set(variables(outvars))

    def reads(i: int) -> Iterable[Any]:
        eqn = jaxpr.eqns[i]
        inside[i], flags = _live_inside(eqn, [var in used for var in eqn.outvars])
        read = [x for x, flag in zip(eqn.invars, flags, strict=True) if flag]
        used.update(variables(read))
        return read

    live, _ = live_positions(jaxpr.eqns, outvars, reads)
    nodes = tuple(LiveEquation(jaxpr.eqns[i], inside[i]) for i in live)
    return nodes, [var in used for var in jaxpr.invars]


def _live_inside(eqn: JaxprEqn, outs: Sequence[bool]) -> tuple[Inside, Sequence[bool]]:
    """Return the live part of the programs inside an equation, and which operands it reads."""
    programs, name = inner_programs(eqn), primitive_name(eqn)
    if name == "scan":
        return _live_in_scan(eqn, programs[0], outs)
    if name == "cond":
        parts = [_live(branch, outs) for branch in programs]
        branch = branch_outside_kernels(eqn)
        run = parts if branch is None else [parts[branch]]
        reads = [any(each) for each in zip(*(part[1] for part in run), strict=True)]
        return tuple(part[0] for part in parts), [True, *reads]
    if len(programs) == 1 and _corresponds(eqn, programs[0]):
        inside, reads = _live(programs[0], outs)
        return (inside,), reads
    return tuple(live_equations(each) for each in programs), [True] * len(eqn.invars)


def _live_in_scan(
    eqn: JaxprEqn, body: Jaxpr, outs: Sequence[bool]
) -> tuple[Inside, Sequence[bool]]:
    """Return the same for a `scan`, whose carry is live if a later step reads it.

    The body is walked until no further carry becomes live.
    """
    consts, carried = loop_parts(eqn)
    wanted = list(outs)
    while True:
        inside, reads = _live(body, wanted)
        more = [w or r for w, r in zip(wanted, reads[consts : consts + carried], strict=False)]
        more += wanted[carried:]
        if more == wanted:
            return (inside,), reads
        wanted = more


def _corresponds(eqn: JaxprEqn, inner: Jaxpr) -> bool:
    """Return whether inputs and results of an equation are those of the program inside."""
    same_number = len(inner.invars) == len(eqn.invars) and len(inner.outvars) == len(eqn.outvars)
    return same_number and primitive_name(eqn) != "while"
