"""What JAX really re-runs: the equations of a segment that its derivative cannot do without.

Each equation runs under a name scope of its own while the segment is differentiated. What the
derivative keeps (its residuals) is then followed back: an equation whose scope is met on the way
must run again. This asks JAX instead of a table of derivative rules, and holds in both builds of
`jax.checkpoint`.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from jrc._jaxpr import (
    Program,
    Traced,
    bind_mark,
    inline_all,
    inner_programs,
    is_atom,
    primitive_name,
    trace,
)
from jrc.remat._policy.resolution import SAVED
from jrc.remat._segments.cut import SectionedProgram
from jrc.remat._segments.recompute_segments import run_section

_SCOPE = "jrc_equation_"


def rerun_positions(traced: Traced, cuts: SectionedProgram) -> list[tuple[int, ...]]:
    """For each segment, the equations that the backward pass runs again, in program order."""
    program = traced.program
    probe = trace(lambda *inputs: _residuals(program, cuts, inputs), traced.inputs, {})
    kept = probe.result.fill(probe.program.jaxpr.outvars)
    # What is no variable is a constant, which nothing has to make again.
    kept = [[var for var in residuals if is_atom(var)] for residuals in kept]
    outvars = [var for residuals in kept for var in residuals]
    # Without `jit` calls, of which a derivative may need a part only.
    flat = Program(inline_all(probe.program.jaxpr.replace(outvars=outvars)))
    at = _by_equation(flat)
    found, start = [], 0
    for cut, residuals in zip(cuts.cuts, kept, strict=True):
        stop = start + len(residuals)
        live = flat.live(flat.jaxpr.outvars[start:stop], given=SAVED) if cut.recompute else ()
        found.append(tuple(p for p in cut.positions if live and _again(program, p, flat, at, live)))
        start = stop
    return found


def _by_equation(probe: Program) -> dict[int, list[int]]:
    """The probe's equations by the equation of the program in whose scope they stand."""
    found: dict[int, list[int]] = {}
    for i, eqn in enumerate(probe.eqns):
        if scope := re.findall(rf"{_SCOPE}(\d+)", str(eqn.source_info.name_stack)):
            found.setdefault(int(scope[-1]), []).append(i)
    return found


def _again(
    program: Program, p: int, probe: Program, at: dict[int, list[int]], live: Sequence[bool]
) -> bool:
    """Whether equation `p` is met on the way from the residuals back to the inputs."""
    mine = at.get(p, [])
    if inner_programs(program.eqns[p]):
        # Of an operator with a program inside, the derivative may need a part: that counts too.
        return any(live[i] for i in mine)
    # The value itself comes first in its scope; what its derivative adds comes behind.
    name = primitive_name(program.eqns[p])
    return next((live[i] for i in mine if primitive_name(probe.eqns[i]) == name), False)


def _residuals(program: Program, cuts: SectionedProgram, inputs: Sequence[Any]) -> list[list[Any]]:
    """What the derivative of each segment's body keeps, in order of segments."""
    values = dict(zip(program.jaxpr.invars, inputs, strict=True))
    kept: list[list[Any]] = []

    def region(body: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        results, pull = jax.vjp(body, *inputs)
        kept[-1] = jax.tree.leaves(pull)
        return results

    for cut in cuts.cuts:
        kept.append([])
        # Held values carry a mark in the place of JAX's name: see `rerun_positions`.
        options: dict[str, Any] = {"name": lambda x, _: bind_mark(x, SAVED, 0), "scope": _scope}
        run_section(program, cut, cuts.policy, values, region, **(options if cut.recompute else {}))
    return kept


def _scope(p: int) -> AbstractContextManager[Any]:
    return jax.named_scope(f"{_SCOPE}{p}")
